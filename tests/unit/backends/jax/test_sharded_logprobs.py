"""The log-prob op over eight devices equals that over one.

Runs as a script of its own: devices are counted at start.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_eight_devices_give_the_numbers_of_one():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def main():
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from rljax.backends.jax.fused import fused_objective
    from rljax.backends.jax.logprobs import token_logprobs
    from rljax.backends.jax.objective import policy_objective
    from rljax.objective.spec import Objective, TokenArrays

    jax.config.update("jax_enable_x64", True)
    random = np.random.default_rng(0)
    rows, width, hidden_size, vocabulary = 8, 5, 8, 304
    hidden = jnp.asarray(random.normal(size=(rows * width, hidden_size)))
    unembedding = jnp.asarray(random.normal(size=(vocabulary, hidden_size)))
    labels = jnp.asarray(random.integers(0, vocabulary, rows * width))
    logps = [jnp.asarray(random.normal(-5, 0.3, (rows, width))) for _ in range(3)]
    tokens = TokenArrays(
        jnp.asarray(random.random((rows, width))),
        jnp.asarray(random.random((rows, width)) < 0.8),
        jnp.asarray(random.normal(size=(rows, width))),
        logps[0],
        jnp.ones((rows, width), int),
        proximal_logp=logps[1],
        reference_logp=logps[2],
    )
    tokens = tokens._replace(advantage=jnp.where(random.random((rows, width)) < 0.5, 0.0, tokens.advantage))

    def unfused(objective, mesh, hidden, unembedding):
        logp, entropy = token_logprobs(hidden, unembedding, labels, temperature=0.7, softcap=3.0, chunk=3, mesh=mesh)
        return policy_objective(logp.reshape(rows, width), entropy.reshape(rows, width), tokens, objective)

    def fused(objective, mesh, hidden, unembedding):
        static = dict(temperature=0.7, softcap=3.0, chunk=3, mesh=mesh)
        return fused_objective(hidden, unembedding, labels, tokens, objective, **static)

    def differentiate(function, objective, mesh):
        return jax.jit(jax.value_and_grad(functools.partial(function, objective, mesh), (0, 1), has_aux=True))

    every = Objective(clip_high=0.28, dual_clip=3.0, weight_cap=2.0, kl_coef=0.1, entropy_coef=0.2)
    by_advantage = Objective(weight_cap=2.0)  # half of the tokens have no gradient
    for objective, axes, functions in (
        (every, (2, 2, 2), (unfused, fused)),
        (every, (1, 1, 8), (unfused, fused)),
        (by_advantage, (2, 2, 2), (fused,)),
    ):
        expected = jax.device_get(differentiate(unfused, objective, None)(hidden, unembedding))
        mesh = jax.make_mesh(axes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
        sharded = (
            jax.device_put(hidden, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))),
            jax.device_put(unembedding, NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))),
        )
        for function in functions:
            compiled = differentiate(function, objective, mesh).lower(*sharded).compile()
            got = jax.device_get(compiled(*sharded))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), got, expected)
            whole_batch = f"[{rows * width},{vocabulary}]"
            assert whole_batch not in compiled.as_text(), "the logits of a whole batch are held by one device"


if __name__ == "__main__":
    main()
