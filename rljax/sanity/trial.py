"""Trial of rewards and filter at the start, on records that they will be asked about.

A reward that fails on every one of a few records ends the run before its model is loaded. One that
answers late does not delay the start: it is waited for in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from rljax.errors import EpisodeError, PluginFailed, RewardError, RewardTimeout, UserError
from rljax.hf.tokenizer import Tokenizer, prompt_ids_of
from rljax.rewards.check import Records, check_records
from rljax.rewards.pool import RewardPool
from rljax.rewards.score import REWARDS, Sampled
from rljax.rollout.producer import Filter
from rljax.sanity.filters import check_filter
from rljax.sanity.findings import Severity
from rljax.types import Prompt

COMPLETION = "The answer is 0."  # what a policy may write that knows nothing
RECORDS = 3  # that have to fail, each with an error
PATIENCE = 5.0  # seconds for which a start waits
OWN_PATIENCE = 0.05  # the same for rewards of rljax, which fail on no text

log = logging.getLogger(__name__)


class RewardTrial:
    """A trial that goes on behind the start if the reward is slow.

    Example:

        some = prompts.spread(RECORDS)
        trial = RewardTrial(rewards, "my_rewards:reward", some, tokenizer, prompts.where)
        await trial.wait()
    """

    def __init__(
        self, rewards: RewardPool, name: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, where: Callable[[str], str]
    ) -> None:
        """
        Args:
          name: `reward.name`.
          prompts: records to try, in order, until one is scored.
          where: returns the origin of a prompt by its uid, as PromptSource.where.
        """
        self._rewards, self._name, self._where = rewards, name, where
        self._prompts, self._tokenizer = prompts, tokenizer
        self._task = asyncio.create_task(self._run(), name="trial of the reward")

    async def wait(self) -> None:
        """Waits for the trial, for a few seconds.

        Raises UserError if the reward fails on all records. What is known later is logged.
        """
        own = all(part.strip() in REWARDS for part in self._name.split(","))
        done, _ = await asyncio.wait([self._task], timeout=OWN_PATIENCE if own else PATIENCE)
        if done:
            return self._task.result()
        if not own:
            log.info("reward.name: %s has not scored a made-up completion in %g s: the run starts", self._name, PATIENCE)
        self._task.add_done_callback(_told_later)
        return None

    async def close(self) -> None:
        """Ends a trial that still waits."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        failures = []
        for prompt in self._prompts:
            failed = await self._failure(prompt)
            if failed is None:
                break
            failures.append((prompt, failed))
        if not failures:
            return
        prompt, first = failures[0]
        line = f"reward.name: {self._name} fails on {COMPLETION!r} to {self._where(prompt.uid)}: {_cause(first, prompt)}"
        late = [isinstance(failed, RewardTimeout) for _, failed in failures]
        if len(failures) == len(self._prompts) and not any(late):
            others = f", and on {len(failures) - 1} more records" if len(failures) > 1 else ""
            raise PluginFailed(f"{line}{others} (return 0 for a completion that it can't read)") from first
        if all(late) and len(failures) < len(self._prompts):
            log.warning(
                "%s (the record after it was scored; an episode whose reward runs longer is dropped: reward.timeout)", line
            )
            return
        log.warning("%s (an episode whose reward fails is dropped)", line)

    async def _failure(self, prompt: Prompt) -> EpisodeError | None:
        """Returns the error of scoring a record; None if there is none."""
        sampled = None
        if self._rewards.reads_ids:
            completion = np.array(self._tokenizer.encode(COMPLETION), np.int32)
            sampled = Sampled.of(self._tokenizer, prompt_ids_of(self._tokenizer, prompt), completion)
        try:
            await self._rewards.try_once(prompt, COMPLETION, sampled)
        except (RewardError, RewardTimeout) as error:
            return error
        return None


@contextlib.asynccontextmanager
async def checked(rewards: RewardPool, name: str, records: Records, tokenizer: Tokenizer) -> AsyncIterator[None]:
    """Checks records against the rewards, and tries the rewards on some; then the block begins.

    A trial that still waits ends with the block.

    Args:
      name: `reward.name`.

    Raises:
      UserError: the records lack what the rewards read, or the rewards fail on all that are tried.
    """
    await check_records(rewards, records)
    prompts, count = records.prompts, min(RECORDS, len(records.prompts))
    some = [prompts[i * len(prompts) // count] for i in range(count)]
    trial = RewardTrial(rewards, name, some, tokenizer, records.where)
    try:
        await trial.wait()
        yield
    finally:
        await trial.close()


async def try_filter(name: str | None, accept: Filter, n_samples: int) -> None:
    """Calls the filter with a made-up group, and logs what is strange.

    An async filter that takes longer than a few seconds is left alone.

    Args:
      name: `rollout.should_accept_fn`; None for no filter.

    Raises:
      UserError: it returns no bool.
    """
    if name is None:
        return
    try:
        async with asyncio.timeout(PATIENCE):
            findings = await check_filter(accept, n_samples)
    except TimeoutError:
        log.info("rollout.should_accept_fn: %s has not judged a made-up group in %g s: the run starts", name, PATIENCE)
        return
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise UserError(str(finding))
        if finding.severity is Severity.WARNING:
            log.warning("%s", finding)


def _told_later(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("%s", error)


def _cause(error: EpisodeError, prompt: Prompt) -> str:
    cause = " ".join(str(error).removeprefix(f"prompt {prompt.uid}: ").split())
    place = getattr(error, "place", "")
    return f"{cause} ({place})" if place else cause
