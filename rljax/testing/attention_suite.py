"""Required results of every attention over packed rows: values and gradients of float64 numpy.

A backend subclasses `AttentionSuite` and says how to run its implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest


class Case(NamedTuple):
    """One call: inputs, the gradient of the output, and the mask."""

    query: np.ndarray  # [B, T, N, D]
    key: np.ndarray  # [B, T, K, D]
    value: np.ndarray  # [B, T, K, D]
    cotangent: np.ndarray  # [B, T, N, D]; 0 on padding
    segment_ids: np.ndarray | None  # [B, T] int32
    scale: float
    softcap: float | None = None
    window: int | None = None

    @property
    def trained(self) -> np.ndarray:
        """Tokens that are not padding, [B, T] bool."""
        return np.ones(self.query.shape[:2], bool) if self.segment_ids is None else self.segment_ids > 0


class Results(NamedTuple):
    """Output and gradients, float64."""

    output: np.ndarray
    d_query: np.ndarray
    d_key: np.ndarray
    d_value: np.ndarray


def oracle(case: Case) -> Results:
    r"""Computes attention and its gradient by the formulas.

    With p = softmax(z): dz = p (dp - \sum p dp).
    """
    groups = case.query.shape[2] // case.key.shape[2]
    key, value = (np.repeat(x, groups, axis=2) for x in (case.key, case.value))
    raw = np.einsum("btnd,bsnd->bnts", case.query, key) * case.scale
    cap = case.softcap
    squashed = raw if cap is None else cap * np.tanh(raw / cap)
    index = np.arange(case.query.shape[1])
    seen = (index[None] <= index[:, None])[None]
    if case.window is not None:
        seen = seen & (index[None] > index[:, None] - case.window)[None]
    if case.segment_ids is not None:
        seen = seen & (case.segment_ids[:, :, None] == case.segment_ids[:, None, :])
    squashed = np.where(seen[:, None], squashed, -np.inf)
    weights = np.exp(squashed - squashed.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    d_weights = np.einsum("btnd,bsnd->bnts", case.cotangent, value)
    d_squashed = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True))
    d_raw = d_squashed * (1.0 if cap is None else 1 - np.tanh(raw / cap) ** 2) * case.scale
    d_value = np.einsum("bnts,btnd->bsnd", weights, case.cotangent)
    d_key = np.einsum("bnts,btnd->bsnd", d_raw, case.query)
    return Results(
        np.einsum("bnts,bsnd->btnd", weights, value),
        np.einsum("bnts,bsnd->btnd", d_raw, key),
        *(x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(axis=3) for x in (d_key, d_value)),
    )


class AttentionSuite:
    """Base of the tests: a subclass sets the attributes and `run`; `length` is at least 64."""

    length = 96
    head_dim = 16
    bound = 2e-6  # ||got - want|| / ||want||
    softcaps = True  # False: the implementation refuses them

    def run(self, case: Case) -> Results:
        """Returns output and gradients; a `window` may also be a traced value (`run_layers`)."""
        raise NotImplementedError

    def run_layers(self, case: Case, windows: Sequence[int | None]) -> list[Results]:
        """Runs the same inputs through one compiled layer body, once per window.

        The body gets its window as a traced value.
        """
        raise NotImplementedError

    def rounded(self, array: np.ndarray) -> np.ndarray:
        """Rounds to the implementation's dtype; returns float64."""
        raise NotImplementedError

    # Cases

    def case(
        self,
        lengths: Sequence[Sequence[int]] | None,
        heads: tuple[int, int] = (4, 2),
        softcap: float | None = None,
        window: int | None = None,
    ) -> Case:
        """Draws a case.

        Args:
          lengths: tokens of each segment of each row, negative for padding; None: two rows of one
            segment.
        """
        random = np.random.default_rng(0)
        rows = 2 if lengths is None else len(lengths)
        shapes = [(rows, self.length, n, self.head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
        query, key, value, cotangent = (self.rounded(random.normal(size=shape)) for shape in shapes)
        segment_ids = None if lengths is None else np.stack([self.ids(row) for row in lengths])
        if segment_ids is not None:
            cotangent = np.where((segment_ids > 0)[..., None, None], cotangent, 0)
        return Case(query, key, value, cotangent, segment_ids, self.head_dim**-0.5, softcap, window)

    def ids(self, lengths: Sequence[int]) -> np.ndarray:
        """Returns segment ids of a row: 1, 2, ..., padded with 0."""
        ids = np.zeros(self.length, np.int32)
        at = segment = 0
        for n in lengths:
            if n > 0:
                segment += 1
                ids[at : at + n] = segment
            at += abs(n)
        assert at <= self.length
        return ids

    @property
    def packed(self) -> list[list[int]]:
        """Segments of several lengths, one token included, and padding at front, middle and end.

        One row is padding alone.
        """
        n = self.length
        return [[n // 3, 1, n // 8, n // 4], [-(n // 8), n // 2, -3, 7], [-n], [n]]

    def assert_right(self, case: Case, got: Results, want: Results | None = None) -> None:
        """Asserts that trained tokens agree, and that padding is finite and gets no gradient."""
        want = want or oracle(case)
        for name, found, expected in zip(Results._fields, got, want, strict=True):
            assert np.isfinite(found).all(), name
            where = case.trained
            error = np.linalg.norm(found[where] - expected[where]) / np.linalg.norm(expected[where])
            assert error <= self.bound, (name, error)

    def skip_softcap(self, softcap: float | None) -> None:
        if softcap is not None and not self.softcaps:
            pytest.skip("refuses soft-caps")

    # Tests

    @pytest.mark.parametrize("heads", [(4, 2), (2, 2), (4, 1)])
    def test_packed_rows(self, heads: tuple[int, int]) -> None:
        case = self.case(self.packed, heads)
        self.assert_right(case, self.run(case))

    @pytest.mark.parametrize("window", [None, 5])
    def test_rows_of_one_segment_each(self, window: int | None) -> None:
        case = self.case(None, window=window)
        self.assert_right(case, self.run(case))

    @pytest.mark.parametrize("window", [2, 7, 1000])
    def test_window(self, window: int) -> None:
        case = self.case(self.packed, window=window)
        self.assert_right(case, self.run(case))

    @pytest.mark.parametrize("window", [None, 9])
    def test_softcap(self, window: int | None) -> None:
        self.skip_softcap(0.7)
        case = self.case(self.packed, softcap=0.7, window=window)
        self.assert_right(case, self.run(case))

    @pytest.mark.parametrize("windows", [(None, 5, 11, None, 5), (7, 3, 7), (5000, 4)])
    def test_windows_that_a_scan_over_layers_tells(self, windows: tuple[int | None, ...]) -> None:
        case = self.case(self.packed)
        for window, got in zip(windows, self.run_layers(case, windows), strict=True):
            self.assert_right(case._replace(window=window), got)

    def test_what_lies_in_another_segment_or_in_padding_reaches_nothing(self) -> None:
        case = self.case(self.packed)
        assert case.segment_ids is not None
        where = np.asarray(case.segment_ids == 1)
        others = ~where[..., None, None]
        query, key, value = (np.where(others, self.rounded(-3 * x), x) for x in (case.query, case.key, case.value))
        before, after = self.run(case), self.run(case._replace(query=query, key=key, value=value))
        for first, second in zip(before, after, strict=True):
            assert np.linalg.norm(second[where] - first[where]) <= self.bound * np.linalg.norm(first[where])
