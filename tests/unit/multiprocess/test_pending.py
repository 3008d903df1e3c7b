"""A call that goes on in several ranks ends when it has in all, or as soon as one fails or is lost."""

import itertools
from concurrent.futures import Future

import pytest

from rljax.errors import RankFailed, UserError
from rljax.multiprocess.pending import PendingCalls

RANKS = frozenset({1, 2})
USER = {"kind": "user", "message": "no room"}


def _happen(pending, local, event, errors):
    if event == "made":
        return pending.of_all(7, RANKS, local)
    if event == "here":
        local.set_exception(UserError("no room here")) if "here" in errors else local.set_result(None)
    else:
        pending.told(event, 7, USER if event in errors else None)
    return None


@pytest.mark.parametrize("errors", [(), ("here",), (1,), (2,)])
def test_the_end_is_that_of_all_or_the_first_error_in_any_order(errors):
    for order in itertools.permutations(["made", "here", 1, 2]):
        pending, local, joint, happened = PendingCalls(), Future(), None, set()
        for event in order:
            joint = _happen(pending, local, event, errors) or joint
            happened.add(event)
            assert joint is None or joint.done() == (bool(happened & set(errors)) or len(happened) == 4), order
        if not errors:
            assert joint.result() is None
            continue
        with pytest.raises(UserError, match="no room here" if errors == ("here",) else f"rank {errors[0]}: no room"):
            joint.result()


def test_a_lost_rank_ends_it():
    pending, local = PendingCalls(), Future()
    joint = pending.of_all(7, RANKS, local)
    pending.fail(RankFailed("rank 1 is gone"))
    with pytest.raises(RankFailed, match="rank 1 is gone"):
        joint.result()
    local.set_result(None)  # comes too late, and is no error
    pending.told(1, 7, None)
