"""Specs from a config.json, and models that are refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.config.keys import walk
from rljax.config.schema import ModelConfig
from rljax.errors import UserError
from rljax.hf import ModelSpec, parameter_count, read_config, spec_of, tensors
from rljax.hf.spec import CLASSES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


@given(
    st.builds(
        ModelConfig,
        architecture=st.sampled_from(("llama", "qwen2", "qwen3", "gemma3")),
        hidden_size=st.sampled_from((32, 48)),
        intermediate_size=st.just(64),
        num_layers=st.integers(1, 8),
        num_heads=st.sampled_from((2, 4)),
        num_kv_heads=st.sampled_from((1, 2)),
        head_dim=st.sampled_from((8, 16)),
        max_position_embeddings=st.integers(1, 100),
        tie_word_embeddings=st.booleans(),
        initializer_range=st.just(0.02),
        tokenizer=st.just("char"),
    )
)
def test_config_round_trip(model):
    spec = spec_of(model, vocab_size=10)
    written = json.loads(json.dumps(spec.to_config()))
    assert ModelSpec.from_config(written) == spec
    assert hash(ModelSpec.from_config(written)) == hash(spec)


def test_published_parameter_count():
    """SmolLM2-135M has 134.5M parameters, the tied embedding counted once."""
    assert round(parameter_count(ModelSpec.from_config(LLAMA)) / 1e6, 1) == 134.5


def test_tied_model_has_no_unembedding():
    assert "lm_head.weight" not in tensors(ModelSpec.from_config(LLAMA))
    assert "lm_head.weight" in tensors(ModelSpec.from_config(LLAMA | {"tie_word_embeddings": False}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported (supported: LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not implemented"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type 'longrope' is not implemented"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not implemented"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_hidden_layers": "30"}, 'num_hidden_layers must be an integer from 1 to 65536, not "30"'),
        ({"num_key_value_heads": 2}, "9 attention heads are no multiple of 2 key/value heads"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
    ],
)
def test_refused_by_name(changes, message):
    with pytest.raises(UserError) as error:
        ModelSpec.from_config(LLAMA | changes, "m/config.json")
    assert str(error.value).startswith("m/config.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such model directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_config(tmp_path)


def test_a_model_can_be_made_on_the_spot_of_every_architecture_that_is_read():
    (choices,) = [leaf.key.choices for leaf in walk(ModelConfig()) if leaf.path == "architecture"]
    assert set(choices) == set(CLASSES)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 12345.0},
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}),
        ("qwen3", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma3_text", GEMMA),
    ],
)
def test_an_export_is_read_by_transformers_before_5_too(tmp_path, kind, rope):
    """Older ones know neither `rope_parameters` nor `dtype`, and would take their defaults in silence."""
    from rljax.hf.companion_files import write_companions

    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = {"model_type": kind, **shape, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "tie_word_embeddings": True}))
    spec = ModelSpec.from_directory(tmp_path / "model")
    write_companions(tmp_path / "export", spec, "bfloat16", tmp_path / "model")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert ModelSpec.from_config(written) == spec
    assert ModelSpec.from_config({key: value for key, value in written.items() if key != "rope_parameters"}) == spec
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
