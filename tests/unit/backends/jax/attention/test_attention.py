"""Every implementation by one suite; those that need a GPU are marked (`pytest -m gpu tests/unit/backends/jax/attention`)."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rljax.backends.jax.attention.choice import IMPLEMENTATIONS
from rljax.backends.jax.attention.interface import Problem
from rljax.backends.jax.attention.splash import SplashAttention
from rljax.backends.jax.attention.xla import XlaAttention
from rljax.backends.jax.model import NO_WINDOW
from rljax.testing.attention_suite import AttentionSuite, Results


class JaxAttention(AttentionSuite):
    attention = XlaAttention()
    dtype = np.float32

    def rounded(self, array):
        return array.astype(self.dtype).astype(np.float64)

    def run(self, case):
        return self.results(self.vjp(case)(jnp.int32(0) if case.window is None else case.window))

    def run_layers(self, case, windows):
        distinct = tuple(dict.fromkeys(windows))
        body = self.vjp(case, distinct)
        told = jnp.asarray([NO_WINDOW if window is None else window for window in windows])
        stacked = jax.jit(lambda told: jax.lax.map(body, told))(told)
        return [self.results([x[layer] for x in stacked]) for layer in range(len(windows))]

    def vjp(self, case, windows=None):
        """window -> output and gradients, jitted; with `windows` it is traced, else `case.window` is static."""
        arrays = [jnp.asarray(x, self.dtype) for x in case[:4]]
        segments = None
        if case.segment_ids is not None:
            segments = self.attention.segments(jnp.asarray(case.segment_ids), self.attention.bounds(case.segment_ids))
        attend = functools.partial(
            self.attention, scale=case.scale, softcap=case.softcap, segments=segments, windows=windows or (None,)
        )

        @jax.jit
        def run(window):
            output, backward = jax.vjp(functools.partial(attend, window=window if windows else case.window), *arrays[:3])
            return output, *backward(arrays[3])

        return run

    def results(self, arrays):
        return Results(*(np.asarray(x).astype(np.float64) for x in arrays))


class TestXla(JaxAttention):
    pass


class TestXlaInBlocksOfQueries(JaxAttention):
    @pytest.fixture(autouse=True)
    def blocks(self, monkeypatch):
        monkeypatch.setattr("rljax.backends.jax.attention.xla.QUERY_BLOCK", 16)


class TestSplash(JaxAttention):
    attention = SplashAttention(interpret=True)
    length = 160  # no whole number of its tiles
    head_dim = 8
    bound = 1e-5


class OnGpu(JaxAttention):
    """In bfloat16: the bound is that of rounding the weights and the output."""

    name = ""
    dtype = ml_dtypes.bfloat16
    length = 1024
    head_dim = 128
    bound = 1e-2

    @pytest.fixture(autouse=True)
    def able(self):
        if jax.devices()[0].platform != "gpu":
            pytest.skip("left out: needs a GPU")
        self.attention = IMPLEMENTATIONS[self.name]
        refusal = self.attention.refusal(gpu_problem())
        if refusal is not None:
            pytest.skip(f"left out: {self.name}: {refusal}")


def gpu_problem():
    device = jax.devices()[0]
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    return Problem("gpu", capability, "bfloat16", head_dim=128, softcap=None, windows=(None,))


@pytest.mark.gpu
class TestCudnn(OnGpu):
    name = "cudnn"
    softcaps = False


@pytest.mark.gpu
class TestCudnnSmallHeads(TestCudnn):
    head_dim = 64
    length = 384


@pytest.mark.gpu
class TestTokamax(OnGpu):
    name = "tokamax"


@pytest.mark.gpu
class TestXlaOnGpu(OnGpu):
    name = "xla"
