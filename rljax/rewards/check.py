"""Check before a run starts that its rewards can score the records of its data."""

from __future__ import annotations

import logging

from rljax.data.prompts import PromptSource
from rljax.errors import EpisodeError, UserError
from rljax.rewards.pool import RewardPool

log = logging.getLogger(__name__)


async def check_records(rewards: RewardPool, prompts: PromptSource) -> None:
    """Checks every prompt of a source against what the rewards say that they read.

    A record that lacks a field is refused. Those whose field holds what the reward can't read (a
    gold answer that is no mathematics) are counted in one warning, and their samples are rejected.

    Raises:
      UserError: a record lacks a field, or no record can be scored.
    """
    every = list(prompts.epoch(0))
    try:
        faults = await rewards.faults(every)
    except EpisodeError as error:
        raise UserError(f"reward.name: checking the records of {prompts.key} failed: {error}") from error
    if not faults:
        return
    index, fault = next(((i, f) for i, f in faults.items() if f.lacks_field), next(iter(faults.items())))
    line = f"reward.name: {prompts.where(every[index].uid)}: {fault.reason}"
    count = f"{len(faults)} of {len(every)} records of {prompts.key}"
    if fault.lacks_field or len(faults) == len(every):
        raise UserError(f"{line} ({count}; use another reward, or a {prompts.key}.type that makes what it reads)")
    log.warning("%s (%s are like it, and their samples are rejected)", line, count)
