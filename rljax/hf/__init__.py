"""Hugging Face model directories without a framework: config, tensors, weights, tokenizer."""

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
