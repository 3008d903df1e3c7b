"""Check before a run starts that its rewards can score the records of its data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rljax.errors import EpisodeError, UserError
from rljax.rewards.pool import RewardPool
from rljax.types import Prompt

log = logging.getLogger(__name__)


MOST = 20_000  # records that are checked, spread over the data: parsing a gold answer takes up to 30 ms


async def check_records(
    rewards: RewardPool, prompts: Sequence[Prompt], where: Callable[[str], str], key: str, total: int | None = None
) -> None:
    """Checks prompts against what the rewards say that they read.

    A record that lacks a field is refused. Those whose field holds what the reward can't read (a
    gold answer that is no mathematics) are counted in one warning, and their samples are rejected.

    Args:
      total: number of records that the prompts were taken from; None if these are all.
      where: returns the origin of a prompt by its uid, as PromptSource.where.
      key: the config section of the data, for messages.

    Raises:
      UserError: a record lacks a field, or no record can be scored.
    """
    try:
        faults = await rewards.faults(prompts)
    except EpisodeError as error:
        raise UserError(f"reward.name: checking the records of {key} failed: {error}") from error
    if not faults:
        return
    index, fault = next(((i, f) for i, f in faults.items() if f.lacks_field), next(iter(faults.items())))
    line = f"reward.name: {where(prompts[index].uid)}: {fault.reason}"
    looked_at = "" if total is None or total == len(prompts) else f", {len(prompts)} of {total} looked at"
    count = f"{len(faults)} of {len(prompts)} records of {key}{looked_at}"
    if fault.lacks_field or len(faults) == len(prompts):
        raise UserError(f"{line} ({count}; use another reward, or a {key}.type that makes what it reads)")
    log.warning("%s (%s are like it, and their samples are rejected)", line, count)
