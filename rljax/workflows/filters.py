"""Which groups are trained on: `rollout.should_accept_fn`.

A filter is a function of a Group that returns a bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rljax.config import registry
from rljax.types import Group

Filter = Callable[[Group], bool]

FILTERS = {"mixed_rewards": "rljax.workflows.filters:mixed_rewards"}


def find_filter(name: str | None) -> Filter:
    """A filter of ours by name, or the user's by "package.module:function"; None accepts every
    group.

    Raises:
      UserError: for a name that is no filter.
    """
    if name is None:
        return accept_all
    return cast(Filter, registry.resolve("rollout.should_accept_fn", name, FILTERS, "filter", ("group",)))


def accept_all(group: Group) -> bool:
    return True


def mixed_rewards(group: Group) -> bool:
    """Rejects a group whose rewards are all equal: its advantages are all zero, and it teaches
    nothing.

    Dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2. An empty group is
    rejected.
    """
    return len({trajectory.reward for trajectory in group.trajectories}) > 1
