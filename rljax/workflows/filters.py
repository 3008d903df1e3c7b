"""Filters: functions of a group, plain or async, that return whether it is trained on.

`rollout.should_accept_fn` names one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable
from typing import cast

from rljax.config import registry
from rljax.rollout.producer import Filter
from rljax.types import Finish, Group

FILTERS = {"mixed_rewards": "rljax.workflows.filters:mixed_rewards"}


def find_filter(name: str | None, *, mask_no_eos: bool = False) -> Filter:
    """Returns a filter of rljax by name, or the user's by "package.module:function".

    None accepts every group.

    Args:
      mask_no_eos: `actor.mask_no_eos`. A filter of rljax then judges what is trained: the
        trajectories that were not cut at a length limit. The user's own sees the whole group.

    Raises:
      UserError: the name is no filter.
    """
    if name is None:
        return accept_all
    accept = cast(Filter, registry.resolve("rollout.should_accept_fn", name, FILTERS, "filter", ("group",)))
    return functools.partial(_accepts_whole, accept) if mask_no_eos and name in FILTERS else accept


def _accepts_whole(accept: Filter, group: Group) -> bool | Awaitable[bool]:
    """Applies a filter to the trajectories of a group that were not cut at a length limit."""
    return accept(Group(group.uid, tuple(t for t in group.trajectories if t.finish is not Finish.LENGTH)))


def accept_all(group: Group) -> bool:
    return True


def mixed_rewards(group: Group) -> bool:
    """Rejects a group whose rewards are all equal: its advantages are zero, and it teaches nothing.

    Dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2. Episodes of several
    parts are equal if their parts have the same rewards. An empty group is rejected.
    """
    return len({frozenset(part.reward for part in parts) for parts in group.episodes()}) > 1
