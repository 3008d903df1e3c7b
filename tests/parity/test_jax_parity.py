import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.backends.jax import fused, logprobs, losses, objective
from rljax.testing.parity_suite import ParitySuite


class TestJaxParity(ParitySuite):
    losses = losses
    token_logprobs = staticmethod(logprobs.token_logprobs)
    policy_objective = staticmethod(objective.policy_objective)
    value_objective = staticmethod(objective.value_objective)
    fused_objective = staticmethod(fused.fused_objective)

    def array(self, x, dtype):
        return jnp.asarray(x, dtype if x.dtype.kind == "f" else None)

    def numpy(self, x):
        x = np.asarray(x)
        return x if x.dtype.kind in "bi" else x.astype(np.float64)

    def gradient(self, function, arrays, *rest):
        return differentiated(function, len(arrays))(*arrays, *rest)

    def precision(self, dtype):
        return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@functools.cache
def differentiated(function, arguments):
    return jax.jit(jax.value_and_grad(function, tuple(range(arguments))))
