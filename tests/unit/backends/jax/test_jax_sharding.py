"""A sharded model computes what the whole one does. Eight devices need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from rljax.backends.jax.sharding import AXES, check, fit, shardings
from rljax.config.schema import ModelConfig
from rljax.errors import UserError
from rljax.hf import spec_of

ROOT = Path(__file__).resolve().parents[4]

PROGRAM = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from rljax.backends.jax import hf, lora
from jax.sharding import NamedSharding
from rljax.backends.jax.cached import CachedTransformer, empty_cache, unstack
from rljax.backends.jax.decode_attention import Groups, IMPLEMENTATIONS, Pages, Places, find_groups, write_and_attend
from rljax.backends.jax.decode_attention.pallas_gpu import PallasGpu
from rljax.backends.jax.sharding import activation_sharding, make_mesh, shardings, single_device_mesh
from rljax.config.schema import ModelConfig
from rljax.hf import ModelSpec, WeightReader, init_directory, tensors

directory, every = sys.argv[1], sys.argv[2] == "every"
assert jax.device_count() == 8
model = ModelConfig("gemma3", 32, 64, 2, 4, 2, 8, 64, False, 0.02, "char")
spec = init_directory(model, directory + "/model", seed=1, vocab_size=48, eos_token_ids=[2])
token_ids = np.random.default_rng(0).integers(0, 48, (8, 12)).astype(np.int32)
positions = np.broadcast_to(np.arange(12, dtype=np.int32), (8, 12))
xla = IMPLEMENTATIONS["xla"]

def spread(cache, mesh, attention=xla):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, attention.spec(x.shape, mesh.shape))), cache)

def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))

def run(mesh):
    graphdef, params = hf.load(directory + "/model", mesh)
    graphdef, adapters = lora.add(graphdef, params, rank=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=1, mesh=mesh)
    rows = [jax.device_put(x, activation_sharding(mesh, "rows", x.shape)) for x in (token_ids, positions)]
    cache = spread(empty_cache(spec, 32, 4, jnp.float32), mesh)
    per_shard = 8 // (mesh.shape["data"] * mesh.shape["fsdp"])  # rows; each shard counts its own pages
    tables = jnp.arange(per_shard * 4).reshape(per_shard, 4)[jnp.arange(8) % per_shard]

    def loss(params, adapters, token_ids, positions):
        model = nnx.merge(graphdef, params, adapters)
        hidden = model(token_ids, positions, jnp.ones_like(token_ids))
        return jnp.sum(jnp.sin(model.logits(hidden) * 9)), hidden

    with jax.set_mesh(mesh):
        (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, adapters, *rows)
        whole, merged = nnx.split(nnx.merge(graphdef, params, adapters))
        merged = nnx.to_pure_dict(merged)
        run = jax.jit(lambda p, ids, at, cache: CachedTransformer(whole, unstack(p)).extend(ids, Places(at, tables), cache))
        cached, _ = run(merged, *rows, cache)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings(spec, mesh)
    return params, jax.device_get((hidden, cached, gradients))

params, (hidden, cached, gradients) = run(single_device_mesh())
np.testing.assert_allclose(cached, hidden, atol=1e-5)
for sizes in (dict(data=2, fsdp=2, tensor=2), dict(data=2, tensor=4), dict(fsdp=8))[: 3 if every else 2]:
    sharded, results = run(make_mesh(jax.devices(), **sizes))
    jax.tree.map(close, results, (hidden, cached, gradients))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), jax.device_get(sharded), jax.device_get(params))
    matrix = sharded["layers"]["up_proj"]["kernel"]
    split = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    assert matrix.addressable_shards[0].data.size * split == matrix.size
    hf.save(sharded, spec, directory + "/saved")
    before, after = WeightReader(directory + "/model"), WeightReader(directory + "/saved")
    for name in tensors(spec):
        np.testing.assert_array_equal(before.read(name), after.read(name))

generator = np.random.default_rng(2)
normal = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)
cache = Pages(normal(32, 2, 16, 16), normal(32, 2, 16, 16))
settings = dict(scale=0.3, softcap=None, window=None)

def inside(attention, mesh, query, key, value, cache, places):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return write_and_attend(attention, query, key, value, cache, places, **settings)

def whole_places(places, shards):
    # The same places on one device: pages counted in the whole pool
    shard = np.arange(len(places.index)) * shards // len(places.index) if places.shard is None else places.shard
    return Places(places.index, places.tables + shard[:, None] * (32 // shards))

def cases(shards):
    # Decode of all rows, alone and in groups; prefill of three rows of chosen shards
    rows, pages = 8 // shards, 32 // shards
    tables = np.concatenate([generator.permutation(pages).reshape(rows, 4) for _ in range(shards)])
    index = generator.integers(40, 64, (8, 1))
    index[2] = -1
    yield Places(index, tables)
    tables = tables.copy()
    for first in range(0, 8, rows):
        tables[first : first + rows, :2] = tables[first, :2]
    found = [find_groups(tables[first : first + rows], pages, np.arange(rows)) for first in range(0, 8, rows)]
    yield Places(index, tables, None, Groups(*(np.concatenate(arrays) for arrays in zip(*found))))
    tables = np.stack([generator.permutation(pages)[:4] for _ in range(3)])
    yield Places(np.arange(30).reshape(3, 10), tables, generator.permutation(shards)[:3])

for attention in (xla, PallasGpu(interpret=True)):
    for sizes in (dict(data=2, fsdp=2, tensor=2), dict(data=4, tensor=2), dict(fsdp=8))[: 3 if every else 1]:
        mesh, shards = make_mesh(jax.devices(), **sizes), sizes.get("data", 1) * sizes.get("fsdp", 1)
        for places in cases(shards):
            query, key, value = (normal(*places.index.shape, heads, 16) for heads in (4, 2, 2))
            out, written = jax.jit(functools.partial(inside, attention, mesh))(query, key, value, spread(cache, mesh), places)
            want, all_written = write_and_attend(xla, query, key, value, cache, whole_places(places, shards), **settings)
            seen = (places.index >= 0)[..., None, None]
            close(np.where(seen, out, 0), np.where(seen, want, 0))
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), jax.device_get(written), jax.device_get(all_written))
print("equal")
"""


@pytest.mark.parametrize("meshes", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_eight_devices_equal_one(meshes, tmp_path):
    """Hidden states, gradients, LoRA and a cache; with fewer key/value heads than tensor shards as well."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), meshes], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


def mesh(data=1, fsdp=1, tensor=1):
    return AbstractMesh((data, fsdp, tensor), AXES)


MODEL = ModelConfig("llama", 32, 48, 2, 4, 2, 8, 64, True, 0.02, "char")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tensor=8), "t8 does not divide the model's 4 attention heads"),
        (dict(fsdp=3), "f3 does not divide the model's 32 elements of a hidden state"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(sizes, message):
    with pytest.raises(UserError, match=message):
        check(spec_of(MODEL, vocab_size=41), mesh(**sizes))


def test_every_parameter_has_a_sharding_and_odd_sizes_stay_whole():
    """41 tokens are not split in two; two key heads are not split in four."""
    whole = shardings(spec_of(MODEL, vocab_size=41), mesh(tensor=4))
    assert whole["embed_tokens"]["kernel"].spec == PartitionSpec(None, "fsdp")
    assert whole["layers"]["k_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", None)
    assert whole["layers"]["q_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert whole["layers"]["o_proj"]["kernel"].spec == PartitionSpec(None, "tensor", "fsdp")


def test_fit_drops_the_axes_that_do_not_divide():
    sizes = {"data": 2, "fsdp": 4, "tensor": 3}
    assert fit((("data", "fsdp"), None, "tensor"), (8, 5, 9), sizes) == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert fit((("data", "fsdp"), None, "tensor"), (6, 5, 8), sizes) == PartitionSpec("data", None, None)
