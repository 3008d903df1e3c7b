"""LoRA: nothing before training, the same merged or not, gradients of the factors alone, names as in peft."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax import hf, lora
from rljax.config.schema import ModelConfig
from rljax.errors import UserError
from rljax.hf import WeightReader, init_directory

MODEL = ModelConfig("qwen2", 32, 48, 2, 4, 2, 8, 64, True, 0.02, "char")
TARGETS = ("q_proj", "v_proj", "down_proj")
RANK, ALPHA = 4, 10.0


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    spec = init_directory(MODEL, path, seed=2, vocab_size=41, eos_token_ids=[1])
    graphdef, params = hf.load(path)
    with_lora, adapters = lora.add(graphdef, params, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=5)
    return spec, graphdef, params, with_lora, adapters


def trained(adapters):
    """Factors that are nowhere zero."""
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0, 0.2, leaf.shape), leaf.dtype), adapters)


def hidden(graphdef, *params):
    token_ids = jnp.asarray(np.random.default_rng(1).integers(0, 41, (2, 9)))
    return nnx.merge(graphdef, *params)(token_ids, jnp.broadcast_to(jnp.arange(9), (2, 9)))


def test_identity_before_training(base):
    _, graphdef, params, with_lora, adapters = base
    np.testing.assert_array_equal(hidden(with_lora, params, adapters), hidden(graphdef, params))


def test_merged_equals_unmerged(base):
    _, graphdef, params, with_lora, adapters = base
    adapters = trained(adapters)
    unmerged = hidden(with_lora, params, adapters)
    np.testing.assert_allclose(hidden(graphdef, lora.merge(params, adapters, ALPHA / RANK)), unmerged, atol=2e-5)
    assert np.abs(unmerged - hidden(graphdef, params)).max() > 0.1


def test_gradient_of_the_factors_alone(base):
    """At B = 0 the gradient of A is 0 and that of B is A's projection of the kernel's: scale * A^T dW."""
    _, graphdef, params, with_lora, adapters = base

    def loss(*params, graphdef):
        return jnp.sum(jnp.sin(hidden(graphdef, *params)))

    gradient = jax.jit(jax.grad(functools.partial(loss, graphdef=with_lora), argnums=1))(params, adapters)
    assert gradient["layers"].keys() == set(TARGETS)
    whole = jax.jit(jax.grad(functools.partial(loss, graphdef=graphdef)))(params)
    for target in TARGETS:
        kernel = whole["layers"][target]["kernel"]
        expected = ALPHA / RANK * jnp.einsum("lir,lio->lro", adapters["layers"][target]["lora_a"], kernel)
        np.testing.assert_allclose(gradient["layers"][target]["lora_b"], expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(gradient["layers"][target]["lora_a"], 0)


def test_saved_as_peft_names_it_and_means_the_same_weights(base, tmp_path):
    """W + alpha / r B A of the saved factors is the merged kernel in HF's layout."""
    spec, _, params, _, adapters = base
    adapters = trained(adapters)
    lora.save(adapters, spec, tmp_path / "adapter", alpha=ALPHA, base="models/base")
    hf.save(lora.merge(params, adapters, ALPHA / RANK), spec, tmp_path / "merged")
    hf.save(params, spec, tmp_path / "base")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert set(config["target_modules"]) == set(TARGETS)
    (tmp_path / "adapter/model.safetensors").symlink_to(tmp_path / "adapter/adapter_model.safetensors")
    factors, merged, before = (WeightReader(tmp_path / name) for name in ("adapter", "merged", "base"))
    name = "model.layers.1.mlp.down_proj"
    a, b = (factors.read(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
    expected = before.read(f"{name}.weight") + config["lora_alpha"] / config["r"] * b @ a
    np.testing.assert_allclose(merged.read(f"{name}.weight"), expected, atol=1e-5)
    np.testing.assert_array_equal(
        merged.read("model.layers.0.mlp.up_proj.weight"), before.read("model.layers.0.mlp.up_proj.weight")
    )


def test_unknown_target_is_refused(base):
    _, graphdef, params, _, _ = base
    with pytest.raises(UserError, match=r"actor\.lora\.target_modules: no projection named 'query' \(one of q_proj, "):
        lora.add(graphdef, params, rank=2, alpha=1.0, targets=("q_proj", "query"), seed=0)
