"""Hugging Face model directories without a framework: config, tensors, weights, tokenizer.

spec.py             the architecture that config.json says, as one frozen value
rope.py             rotary position embeddings of a config
other_model.py      the same of a family without an implementation here
read_model.py       either of them, of a directory
shapes.py           published models by name: their shapes alone
tensors.py          names and shapes of tensors; splits.py, what their dims must divide by
flops.py            FLOPs of a step; activations.py, its memory
model_directory.py  the directory that a run starts from
init.py             a random model, the same for every backend
weights.py          safetensors by tensor or slice; whole_model.py, of image-text models
tensor_checks.py    stored tensors by their bits: finite, the same
adapter.py          LoRA adapters as peft writes them
gguf.py             a Llama in GGUF to a directory
companion_files.py  files beside the weights; turn_ends.py, their EOS ids
tokenizer.py        token ids, text and chat templates; tokenizer_files.py, what loads them
agreement.py        whether tokenizer, template and model agree
teacher.py          whether a teacher shares the policy's tokens
"""

from rljax.hf.init import init_directory, spec_of
from rljax.hf.other_model import Model, OtherModel
from rljax.hf.read_model import read_model
from rljax.hf.rope import RopeSpec, frequencies
from rljax.hf.spec import ModelSpec, read_config
from rljax.hf.tensors import parameter_count, tensors
from rljax.hf.weights import DTYPES, WeightReader, write_json, write_weights

__all__ = [
    "DTYPES",
    "Model",
    "ModelSpec",
    "OtherModel",
    "RopeSpec",
    "WeightReader",
    "frequencies",
    "init_directory",
    "parameter_count",
    "read_config",
    "read_model",
    "spec_of",
    "tensors",
    "write_json",
    "write_weights",
]
