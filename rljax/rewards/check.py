"""Check before a run starts that its rewards can score the records of its data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from rljax.config.validation import key_of
from rljax.data.held_out import HeldOut
from rljax.data.prompts import PromptSource
from rljax.errors import EpisodeError, UserError
from rljax.rewards.pool import RewardPool
from rljax.types import Prompt

log = logging.getLogger(__name__)


MOST = 20_000  # records that are checked, spread over the data: parsing a gold answer takes up to 30 ms


@dataclasses.dataclass(frozen=True)
class Records:
    """Records of a data set, for its rewards to be checked and tried on.

    Example: Records(prompts, where="test.jsonl:{}".format, key="valid_dataset")
    """

    prompts: Sequence[Prompt]
    where: Callable[[str], str]  # returns the origin of a prompt by its uid, as PromptSource.where
    key: str  # the config section of the data, for messages
    total: int | None = None  # number of records that the prompts were taken from; None if these are all

    @classmethod
    def of_stream(cls, source: PromptSource) -> Records:
        """Returns records spread over the data of a stream."""
        return cls(source.spread(MOST), source.where, source.key, len(source))

    @classmethod
    def of_set(cls, held_out: HeldOut) -> Records:
        """Returns all records of a validation set."""
        return cls(held_out.prompts, held_out.where, key_of(held_out.name))


async def check_records(rewards: RewardPool, records: Records) -> None:
    """Checks prompts against what the rewards say that they read.

    A record that lacks a field is refused. Those whose field holds what the reward can't read (a
    gold answer that is no mathematics) are counted in one warning, and their samples are rejected.

    Raises:
      UserError: a record lacks a field, or no record can be scored.
    """
    prompts, key, total = records.prompts, records.key, records.total
    try:
        faults = await rewards.faults(prompts)
    except EpisodeError as error:
        raise UserError(f"reward.name: checking the records of {key} failed: {error}") from error
    if not faults:
        return
    index, fault = next(((i, f) for i, f in faults.items() if f.lacks_field), next(iter(faults.items())))
    line = f"reward.name: {records.where(prompts[index].uid)}: {fault.reason}"
    looked_at = "" if total is None or total == len(prompts) else f", {len(prompts)} of {total} looked at"
    count = f"{len(faults)} of {len(prompts)} records of {key}{looked_at}"
    if fault.lacks_field or len(faults) == len(prompts):
        raise UserError(f"{line} ({count}; use another reward, or a {key}.type that makes what it reads)")
    log.warning("%s (%s are like it, and their samples are rejected)", line, count)
