"""Evaluation: the workflow without a learner, on other prompts.

Failed episodes are counted; they never enter the mean as a reward of zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from rljax.config.schema import Config
from rljax.engine import Generator
from rljax.metrics.mean import Mean
from rljax.rollout.gathering import Gathering
from rljax.rollout.producer import EpisodeResult, RetryingGenerator, parts_of, run_episode
from rljax.rollout.result import Failure
from rljax.rollout.trajectories import no_eos_ratio, reward_components
from rljax.rollout.workflow import Workflow
from rljax.seeding import seed_for
from rljax.types import PROMPT_VERSION, Prompt, SamplingParams

PREFIX = "eval-rollout"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Prompts, workflow and sampling parameters of an evaluation."""

    prompts: Sequence[Prompt]
    workflow: Workflow
    params: SamplingParams
    n_samples: int  # episodes per prompt


async def evaluate(
    generator: Generator, evaluation: Evaluation, config: Config, beat: Callable[[str], None]
) -> dict[str, Mean]:
    """Runs `n_samples` episodes per prompt, `valid_dataset.batch_size` prompts at once.

    Seeds depend on the run's seed and the prompt only, so all evaluations of a run use the same
    seeds.

    Returns:
      Metrics under `eval-rollout/` and `eval-reward/`.
    """
    lost: Counter[str] = Counter()
    retrying = RetryingGenerator(
        generator,
        timeout=config.rollout.request_timeout,
        retries=config.rollout.request_retries,
        lost=lambda error: lost.update([error.kind]),
    )
    room = asyncio.Semaphore(config.valid_dataset.batch_size * evaluation.n_samples)

    together = [Gathering(evaluation.n_samples) for _ in evaluation.prompts]

    async def episode(index: int, sample: int) -> EpisodeResult:
        prompt = evaluation.prompts[index]
        seed = seed_for(config.seed, f"eval/{prompt.uid}", sample)
        async with room:
            with together[index].member():
                result = await run_episode(
                    evaluation.workflow,
                    retrying,
                    prompt,
                    evaluation.params,
                    seed,
                    timeout=config.episode_timeout,
                    kind="evaluation",
                )
        beat(f"evaluation {prompt.uid}")
        return result

    numbers = [(index, sample) for index in range(len(evaluation.prompts)) for sample in range(evaluation.n_samples)]
    results = await asyncio.gather(*(episode(index, sample) for index, sample in numbers))
    episodes = [parts for result in results if (parts := parts_of(result, 0))]
    trajectories = [trajectory for parts in episodes for trajectory in parts]
    weights = [1 / len(parts) for parts in episodes for _ in parts]
    failures = [r for r in results if isinstance(r, Failure)]
    failed = Counter(r.kind for r in failures)
    if not trajectories:  # the reward is then NaN
        outcomes = [f"{count} {kind}" for kind, count in failed.items()] + [f"{len(results) - len(failures)} rejected"]
        first = f"; the first: {failures[0].reason}" if failures else ""
        log.warning("no episode of the evaluation has a reward: %s%s", ", ".join(outcomes), first)
    elif failures:  # hard prompts fail more often: without them the mean reward looks better than it is
        message = "the evaluation's reward leaves out %d of %d episodes, which failed; the first: %s"
        log.warning(message, len(failures), len(results), failures[0].reason)
    metrics = {
        f"{PREFIX}/reward": Mean.of(sum(t.reward for t in parts) / len(parts) for parts in episodes),
        f"{PREFIX}/no_eos_ratio": no_eos_ratio(trajectories),
        f"{PREFIX}/seq_len": Mean.of(int((t.versions != PROMPT_VERSION).sum()) for t in trajectories),
        f"{PREFIX}/failed": Mean(sum(failed.values()), 1),
    }
    metrics |= {f"{PREFIX}/failed/{kind}": Mean(count, 1) for kind, count in failed.items()}
    metrics |= {f"{PREFIX}/lost/{kind}": Mean(count, 1) for kind, count in lost.items()}
    return metrics | reward_components(trajectories, "eval-reward", weights)
