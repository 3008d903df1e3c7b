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
from rljax.evaluation.estimates import pass_at_k
from rljax.evaluation.protocol import Protocol
from rljax.metrics.mean import Mean
from rljax.rollout.gathering import Gathering
from rljax.rollout.producer import EpisodeResult, RetryingGenerator, parts_of, run_episode
from rljax.rollout.result import Failure
from rljax.rollout.trajectories import no_eos_ratio, reward_components
from rljax.rollout.workflow import Workflow
from rljax.seeding import seed_for
from rljax.types import PROMPT_VERSION, Prompt, SamplingParams, Trajectory

PREFIX = "eval-rollout"
COMPONENTS = "eval-reward"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Prompts, workflow and sampling parameters of an evaluation on one set."""

    prompts: Sequence[Prompt]
    workflow: Workflow
    params: SamplingParams
    n_samples: int  # episodes per prompt
    name: str = ""  # of the set, in metrics; empty for valid_dataset
    protocol: Protocol | None = None  # for the records of the run; None: it has none


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Results of all episodes of an evaluation."""

    evaluation: Evaluation
    results: Sequence[Sequence[EpisodeResult]]  # by prompt and sample; None where the workflow rejected
    lost: Counter[str]  # requests that a sampler lost, by kind

    def by_prompt(self) -> list[list[tuple[Trajectory, ...]]]:
        """Returns the parts of each episode that has a reward, of each prompt in order."""
        return [[parts for result in row if (parts := parts_of(result, 0))] for row in self.results]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [part for row in self.by_prompt() for parts in row for part in parts]

    @property
    def failures(self) -> list[Failure]:
        return [result for row in self.results for result in row if isinstance(result, Failure)]

    def warn(self) -> None:
        """Logs a warning if episodes failed."""
        trajectories, failures = self.trajectories, self.failures
        episodes = sum(len(row) for row in self.results)
        if not trajectories:  # the reward is then NaN
            failed = Counter(failure.kind for failure in failures)
            outcomes = [f"{count} {kind}" for kind, count in failed.items()] + [f"{episodes - len(failures)} rejected"]
            first = f"; the first: {failures[0].reason}" if failures else ""
            log.warning("no episode of the evaluation has a reward: %s%s", ", ".join(outcomes), first)
        elif failures:  # hard prompts fail more often: without them the mean reward looks better than it is
            message = "the evaluation's reward leaves out %d of %d episodes, which failed; the first: %s"
            log.warning(message, len(failures), episodes, failures[0].reason)


async def run(generator: Generator, evaluation: Evaluation, config: Config, beat: Callable[[str], None]) -> Episodes:
    """Runs `n_samples` episodes per prompt, `valid_dataset.batch_size` prompts at once.

    Seeds depend on the run's seed and the prompt only, so all evaluations of a run use the same
    seeds.
    """
    lost: Counter[str] = Counter()
    retrying = RetryingGenerator(
        generator,
        timeout=config.request_timeout,
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

    n = evaluation.n_samples
    results = await asyncio.gather(*(episode(p, i) for p in range(len(evaluation.prompts)) for i in range(n)))
    return Episodes(evaluation, [results[start : start + n] for start in range(0, len(results), n)], lost)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Metrics and some trajectories of evaluations."""

    metrics: dict[str, Mean]
    samples: Sequence[tuple[str, str, Trajectory]]  # name of the set, uid of the prompt, the first part of an episode


async def evaluate(generator: Generator, evaluation: Evaluation, config: Config, beat: Callable[[str], None]) -> Evaluated:
    """Evaluates on one set.

    Returns:
      Metrics under `eval-rollout/` and `eval-reward/`, those of a set with a name under
      `eval-rollout/NAME/` and `eval-reward/NAME/`; and a trajectory of each of the first
      `stats_logger.samples_per_evaluation` prompts that have one.
    """
    episodes = await run(generator, evaluation, config, beat)
    episodes.warn()
    prompts = zip(evaluation.prompts, episodes.by_prompt(), strict=True)
    samples = [(evaluation.name, prompt.uid, row[0][0]) for prompt, row in prompts if row]
    return Evaluated(metrics_of(episodes, config), samples[: config.stats_logger.samples_per_evaluation])


def metrics_of(episodes: Episodes, config: Config) -> dict[str, Mean]:
    """Returns the metrics of an evaluation, as `evaluate` does."""
    done = [parts for row in episodes.by_prompt() for parts in row]
    trajectories, name = episodes.trajectories, episodes.evaluation.name
    weights = [1 / len(parts) for parts in done for _ in parts]
    failed = Counter(failure.kind for failure in episodes.failures)
    prefix, components = (f"{head}/{name}" if name else head for head in (PREFIX, COMPONENTS))
    versions = [v for t in trajectories for v in t.versions[t.versions != PROMPT_VERSION].tolist()]
    metrics = {
        f"{prefix}/reward": Mean.of(map(reward_of, done)),
        f"{prefix}/no_eos_ratio": no_eos_ratio(trajectories),
        f"{prefix}/seq_len": Mean.of(int((t.versions != PROMPT_VERSION).sum()) for t in trajectories),
        f"{prefix}/version": Mean.of(versions),
        f"{prefix}/failed": Mean(sum(failed.values()), 1),
    }
    metrics |= {f"{prefix}/pass@{k}": _passing(episodes, k, config.evaluator.success) for k in config.evaluator.ks}
    metrics |= {f"{prefix}/failed/{kind}": Mean(count, 1) for kind, count in failed.items()}
    metrics |= {f"{prefix}/lost/{kind}": Mean(count, 1) for kind, count in episodes.lost.items()}
    return metrics | reward_components(trajectories, components, weights)


def reward_of(parts: Sequence[Trajectory]) -> float:
    """Returns the reward of an episode: the mean over its parts."""
    return sum(part.reward for part in parts) / len(parts)


def _passing(episodes: Episodes, k: int, success: float) -> Mean:
    """Returns pass@k over the prompts with at least k samples."""
    scored = [list(map(reward_of, row)) for row in episodes.by_prompt()]
    values = [pass_at_k(len(row), sum(reward >= success for reward in row), k) for row in scored if len(row) >= k]
    return Mean(float(sum(values)), len(values))
