"""Filters: functions of a group, plain or async, that return whether it is trained on.

`rollout.should_accept_fn` names one.
"""

from __future__ import annotations

from typing import cast

from rljax.config import registry
from rljax.rollout.producer import Filter
from rljax.types import Group

FILTERS = {"mixed_rewards": "rljax.workflows.filters:mixed_rewards"}


def find_filter(name: str | None) -> Filter:
    """Returns a filter of rljax by name, or the user's by "package.module:function".

    None accepts every group.

    Raises:
      UserError: the name is no filter.
    """
    if name is None:
        return accept_all
    return cast(Filter, registry.resolve("rollout.should_accept_fn", name, FILTERS, "filter", ("group",)))


def accept_all(group: Group) -> bool:
    return True


def mixed_rewards(group: Group) -> bool:
    """Rejects a group whose rewards are all equal: its advantages are zero, and it teaches nothing.

    Dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2. Episodes of several
    parts are equal if their parts have the same rewards. An empty group is rejected.
    """
    return len({frozenset(part.reward for part in parts) for parts in group.episodes()}) > 1
