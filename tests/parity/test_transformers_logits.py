"""Our transformer and the one of transformers are the same function of the same directory."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax import hf
from rljax.hf import ModelSpec, WeightReader, tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4  # max abs of float32 logits
SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
FULL_LINEAR = {
    "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=50.0),
}
# The window of 5 is shorter than the rows of 24, so that a layer that ignores it is found out.
VARIANTS = {
    "llama": ("Llama", dict()),
    "llama tied, wide heads": ("Llama", dict(tie_word_embeddings=True, head_dim=16)),
    "llama biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama multi-query, gelu": ("Llama", dict(num_key_value_heads=1, hidden_act="gelu")),
    "llama linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=3.0))),
    "llama llama3": ("Llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16))),
    "llama yarn": ("Llama", dict(rope_parameters=YARN)),
    "qwen2": ("Qwen2", dict()),
    "qwen2 yarn, mscale": ("Qwen2", dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5, truncate=False))),
    "qwen2 tied, windows": (
        "Qwen2",
        dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3 biases, windows": (
        "Qwen3",
        dict(head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "gemma3": ("Gemma3Text", dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=24, sliding_window_pattern=2)),
    "gemma3 scaled, capped, biases": (
        "Gemma3Text",
        dict(
            head_dim=16,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters=FULL_LINEAR,
            final_logit_softcapping=3.0,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
}


@pytest.fixture(scope="module", params=list(VARIANTS), ids=lambda name: name.replace(" ", "_"))
def directory(request, tmp_path_factory):
    """A model with no parameter at its neutral value, written by transformers."""
    name, changes = VARIANTS[request.param]
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def torch_logits(path, token_ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(token_ids)).logits.numpy()


def jax_logits(path, token_ids, dtype=jnp.float32, precise=False):
    graphdef, params = hf.load(path, dtype=dtype, param_dtype=dtype, precise=precise)

    @jax.jit
    def run(params, token_ids, positions):
        model = nnx.merge(graphdef, params)
        return model.logits(model(token_ids, positions))

    token_ids = np.asarray(token_ids, np.int32)
    return np.asarray(run(params, token_ids, np.broadcast_to(np.arange(token_ids.shape[1]), token_ids.shape)))


@pytest.mark.parametrize("precise", [False, True], ids=["plain", "precise"])
def test_logits_agree(directory, precise):
    token_ids = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 24))
    theirs, ours = torch_logits(directory, token_ids), jax_logits(directory, token_ids, precise=precise)
    assert np.abs(theirs).max() > 1  # else the bound below means nothing
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=BOUND)


def test_saved_model_is_the_same_to_transformers(directory, tmp_path):
    """With a config.json of our own making, and weights that went through the device."""
    spec = ModelSpec.from_directory(directory)
    _, params = hf.load(directory)
    hf.save(params, spec, tmp_path)
    token_ids = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (1, 24))
    np.testing.assert_array_equal(torch_logits(tmp_path, token_ids), torch_logits(directory, token_ids))
    assert ModelSpec.from_directory(tmp_path) == spec
    before, after = WeightReader(directory), WeightReader(tmp_path)
    for name in tensors(spec):
        np.testing.assert_array_equal(before.read(name), after.read(name))


def test_older_config_spelling_is_the_same_model(directory, tmp_path):
    """Before transformers 5: rope_theta, rope_scaling and rope_local_base_freq in place of rope_parameters."""
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if rope["rope_type"] != "default" else None
    assert ModelSpec.from_config(config) == ModelSpec.from_directory(directory)
