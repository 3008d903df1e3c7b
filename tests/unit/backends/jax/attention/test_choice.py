"""The choice of an implementation, and what cuDNN is told about segments; no kernel runs here."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.backends.jax.attention import choice, cudnn
from rljax.backends.jax.attention.choice import IMPLEMENTATIONS, choose, problem_of
from rljax.backends.jax.attention.cudnn import CudnnAttention
from rljax.backends.jax.attention.interface import Problem, by_window
from rljax.config.keys import leaves_of
from rljax.config.schema import ModelConfig
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.hf import spec_of

HOPPER = Problem("gpu", (9, 0), "bfloat16", head_dim=128, softcap=None, windows=(None,))


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    """Those that were tried, whatever is installed here."""
    monkeypatch.setattr(cudnn, "JAX_VERSIONS", ((0, 0), (99, 0)))
    monkeypatch.setattr("rljax.backends.jax.attention.tokamax._version", lambda: None)


@pytest.mark.parametrize(
    "change, name",
    [
        ({}, "cudnn"),
        (dict(windows=(512,)), "cudnn"),
        (dict(dtype="float32"), "xla"),
        (dict(head_dim=20), "xla"),
        (dict(capability=(8, 0)), "xla"),
        (dict(softcap=50.0), "xla"),
        (dict(platform="tpu", capability=None), "splash"),
        (dict(platform="tpu", capability=None, softcap=50.0, windows=(None, 512)), "splash"),
        (dict(platform="cpu", capability=None, dtype="float32"), "xla"),
    ],
)
def test_auto_takes_the_first_that_can_and_says_which(change, name, caplog):
    problem = HOPPER.__class__(**(vars(HOPPER) | change))
    with caplog.at_level(logging.INFO):
        assert choose("auto", problem).name == name
    (line,) = caplog.messages
    assert line.startswith(f"jax.attention: {name}")
    for other in list(IMPLEMENTATIONS)[: list(IMPLEMENTATIONS).index(name)]:
        assert f"{other}: " in line


def test_what_was_asked_for_and_cannot_be_done_is_an_error_that_says_why():
    with pytest.raises(
        UserError, match=r"^jax.attention: cudnn can't be used here: .* not float32 \(of the others, xla can\)$"
    ):
        choose("cudnn", HOPPER.__class__(**(vars(HOPPER) | dict(dtype="float32"))))
    with pytest.raises(UserError, match=r"jax.attention: tokamax can't .* not installed"):
        choose("tokamax", HOPPER)
    with pytest.raises(UserError, match=r"no 'flash' \(there is auto, cudnn, splash, tokamax, xla\)"):
        choose("flash", HOPPER)


def test_a_jax_that_was_not_tried_is_refused(monkeypatch):
    monkeypatch.setattr(cudnn, "JAX_VERSIONS", ((99, 0), (99, 1)))
    with pytest.raises(UserError, match=r"tried with jax 99.0 only, and this is " + jax.__version__):
        choose("cudnn", HOPPER)


def test_the_config_knows_the_same_names():
    (attention,) = (leaf for leaf in leaves_of(JaxConfig(), "jax") if leaf.path == "jax.attention")
    assert attention.key.choices == (choice.AUTO, *IMPLEMENTATIONS)


def test_windows_that_hide_nothing_of_a_row_are_none():
    spec = spec_of(ModelConfig("gemma3", 32, 48, 6, 4, 2, 8, 64, True, 0.02, "char"), vocab_size=41)
    (size,) = {window for window in spec.windows if window is not None}
    assert problem_of(spec, "float32", jax.devices()[0], size + 1).windows == (size, None)
    assert problem_of(spec, "float32", jax.devices()[0], size).windows == (None,)


@pytest.mark.parametrize("longest, called", [(4, {None}), (5, {None}), (6, {None, 5}), (100, {None, 5, 11})])
def test_only_windows_shorter_than_the_longest_segment_are_compiled(longest, called):
    compiled = set()

    def attend(window):
        compiled.add(window)
        return jnp.int32(window or 0)

    run = jax.jit(lambda window: by_window(attend, window, (None, 5, 11), longest))
    for window in (5, 11, 2**30):
        assert run(window) == (window if window in called else 0)
    assert compiled == called


lengths = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=30)  # every shape compiles
@given(rows=st.lists(lengths, min_size=1, max_size=2), length=st.sampled_from((48, 96)))
def test_cudnn_is_told_of_every_run_of_equal_ids_once(rows, length):
    """The lengths and offsets it gets, block by block, cover all tokens in order, and none is longer than a block."""
    ids = np.stack([row_of(row, length) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "SHORTEST", 8)
        bounds = CudnnAttention().bounds(ids)
        segments = CudnnAttention().segments(jnp.asarray(ids), bounds)
    sizes, offsets = np.asarray(segments.lengths), np.asarray(segments.offsets)
    assert length % segments.longest == 0 and segments.longest == bounds.longest
    assert sizes.shape[1] >= 2 and offsets.shape[1] == sizes.shape[1] + 1
    assert ((sizes > 0) == (offsets[:, :-1] >= 0)).all() and (offsets[:, -1] == -1).all()
    assert sizes.max() <= segments.longest
    block, slot = np.nonzero(sizes > 0)
    first = block * segments.longest + offsets[block, slot]
    size = sizes[block, slot]
    np.testing.assert_array_equal(first, np.cumsum(size) - size)
    assert size.sum() == ids.size
    flat = ids.reshape(-1)
    for at, n in zip(first, size, strict=True):
        assert len(set(flat[at : at + n])) == 1 and at // length == (at + n - 1) // length
        whole = (
            n == segments.longest or at + n == ids.size or (at + n) % length == 0 or flat[at + n] != flat[at] or flat[at] == 0
        )
        assert whole  # no segment is cut


def row_of(parts, length):
    """Segments 1, 2, ... and stretches of padding, cut at the row's end."""
    row, segment = np.zeros(0, np.int32), 0
    for n, padding in parts:
        segment += not padding
        row = np.append(row, np.full(n, 0 if padding else segment, np.int32))
    return np.pad(row[:length], (0, max(length - len(row), 0)))
