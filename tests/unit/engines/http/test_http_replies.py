"""Versions of tokens, reconstructed from the reports of all kinds of servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.engines.http.protocol import spans
from rljax.engines.http.replies import Reply, version_of
from rljax.errors import SamplerError
from rljax.types import Finish


def chunk(total: int, shown: list[int], label: int, finish=None, reported=None) -> dict:
    meta = {
        "completion_tokens": total,
        "weight_version": str(label),
        "finish_reason": finish and {"type": finish},
        "output_token_logprobs": [[-float(token), token, None] for token in shown],
    }
    return {"output_ids": shown, "meta_info": meta | ({"weight_versions": reported} if reported else {})}


histories = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12)
"""Tokens a chunk brings, and whether weights are swapped behind it."""


def truth_of(history) -> list[int]:
    versions, version = [], 0
    for count, swap in history:
        versions += [version] * count
        version += swap
    return versions


@given(histories, st.booleans(), st.booleans())
def test_however_a_stream_is_cut_the_tokens_and_exact_versions_come_back(history, incremental, overlapped):
    truth = truth_of(history)
    reply, total = Reply(version_when_sent=0, overlapped=overlapped), 0
    for index, (count, _) in enumerate(history):
        last = index == len(history) - 1
        start, total = total, total + count
        shown = list(range(start if incremental else 0, total))
        label = truth[total - 1] if total else 0
        reply.add(chunk(total, shown, label, "length" if last else None, spans(truth) if last else None))
    token_ids, logp, versions = reply.arrays()
    assert token_ids.tolist() == list(range(total)) and reply.finish is Finish.LENGTH
    np.testing.assert_array_equal(logp, -np.arange(total))
    shifted = [min(version, before) for version, before in zip(truth, [0, *truth], strict=False)]
    assert versions.tolist() == (shifted if overlapped else truth)


@given(histories, st.lists(st.booleans(), min_size=12, max_size=12))
def test_labels_alone_never_make_a_token_younger_than_it_is(history, overtaken):
    """The front end labels a chunk with the version it knows when the chunk passes.

    A swap may overtake the chunk before it.
    """
    truth = truth_of(history)
    reply, total, version = Reply(version_when_sent=0, overlapped=True), 0, 0
    for (count, swap), early in zip(history, overtaken, strict=False):
        total += count
        reply.add(chunk(total, list(range(total)), version + (swap and early)))
        version += swap
    assert all(got <= want for got, want in zip(reply.versions, truth, strict=True))
    assert reply.versions == sorted(reply.versions)


def test_spans_of_increments_add_up():
    """Our server reports the spans of each chunk alone."""
    reply = Reply(version_when_sent=3, overlapped=False)
    reply.add(chunk(2, [0, 1], 3, None, spans([3, 3])))
    reply.add(chunk(4, [2, 3], 4, None, spans([3, 4], 2)))
    reply.add(chunk(4, [], 4, "stop"))
    assert reply.versions == [3, 3, 3, 4] and reply.finish is Finish.STOP


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"output_ids": [1]},
        {"output_ids": [1], "meta_info": {}},
        chunk(3, [1], 0),
        {"output_ids": [1], "meta_info": {"completion_tokens": 1, "weight_version": "0", "finish_reason": None}},
        chunk(1, [1], 0, "unheard of"),
    ],
)
def test_what_is_no_completion_is_refused(broken):
    with pytest.raises(SamplerError):
        Reply(0, False).add(broken)


def test_weights_that_nobody_numbered_are_version_zero_and_foreign_names_are_refused():
    assert version_of("default") == 0 and version_of("17") == 17
    with pytest.raises(SamplerError, match="step-17b"):
        version_of("step-17b")
