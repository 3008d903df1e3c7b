"""A kernel that XLA can't partition sees each device's own rows and heads: over eight devices as over one.

Runs as a script of its own: devices are counted at start. The kernel is splash, interpreted; what cuDNN is told of segments
is worked out on each device's rows too.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]


def test_eight_devices_give_the_numbers_of_one():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def main():
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np

    from rljax.backends.jax.attention.cudnn import CudnnAttention
    from rljax.backends.jax.attention.splash import SplashAttention
    from rljax.backends.jax.sharding import activation_sharding, make_mesh

    random = np.random.default_rng(0)
    ids = np.sort(random.integers(1, 4, (4, 128)), axis=1).astype(np.int32)
    query, key, value = (jnp.asarray(random.normal(size=(4, 128, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    attend = functools.partial(SplashAttention(interpret=True), scale=0.4, segments=jnp.asarray(ids))
    gradient = jax.jit(jax.value_and_grad(lambda *inputs: jnp.sum(jnp.sin(attend(*inputs))), (0, 1, 2)))
    want = jax.device_get(gradient(query, key, value))
    cudnn = CudnnAttention()
    bounds = cudnn.bounds(ids)
    layout = jax.jit(lambda ids: cudnn.segments(ids, bounds))
    told = jax.device_get(layout(jnp.asarray(ids)))
    for axes in (dict(data=2, fsdp=2, tensor=2), dict(data=2, tensor=4)):  # 4 does not divide the key heads
        mesh = make_mesh(jax.devices(), **axes)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, activation_sharding(mesh, "heads", x.shape)) for x in (query, key, value)]
            got = jax.device_get(gradient(*placed))
            again = jax.device_get(layout(jax.device_put(ids, activation_sharding(mesh, "rows", ids.shape))))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
        jax.tree.map(np.testing.assert_array_equal, again, told)


if __name__ == "__main__":
    main()
