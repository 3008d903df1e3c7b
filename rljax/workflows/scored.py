"""Results of evaluations: from trajectories to samples with their final answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rljax.config.schema import Config
from rljax.evaluation.results import Answers, Policy, Result, Sample, ks_of
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.answers import find_parser, parse_answers
from rljax.rollout.evaluation import Episodes
from rljax.rollout.result import Failure
from rljax.types import PROMPT_VERSION, Trajectory


def result_of(episodes: Episodes, config: Config, policy: Policy, tokenizer: Tokenizer) -> Result:
    """Returns the result of an evaluation; parses final answers where the reward can, to vote over.

    Blocks while answers are parsed.
    """
    evaluation = episodes.evaluation
    assert evaluation.protocol is not None, "its protocol is that of the result"
    answers = iter(_answers(episodes.trajectories, config, tokenizer) or ())
    has_answers = config.evaluator.n_samples > 1 and find_parser(config.reward.name) is not None
    rows = []
    for prompt, row in zip(evaluation.prompts, episodes.results, strict=True):
        samples = [_sample(each, next(answers, None)) for each in row if isinstance(each, Trajectory)]
        failed = Counter(
            each.kind if isinstance(each, Failure) else "rejected" for each in row if not isinstance(each, Trajectory)
        )
        rows.append(Answers(prompt.uid, samples, dict(failed)))
    ks = ks_of(config.evaluator.n_samples, config.evaluator.ks)
    return Result(policy, evaluation.name, evaluation.protocol, config.seed, ks, rows, has_answers)


def _answers(trajectories: Sequence[Trajectory], config: Config, tokenizer: Tokenizer) -> list[str | None] | None:
    """Parses the final answers; None if nothing votes over them."""
    if config.evaluator.n_samples == 1 or find_parser(config.reward.name) is None:
        return None
    texts = [tokenizer.decode(last_completion(trajectory)) for trajectory in trajectories]
    return parse_answers(texts, name=config.reward.name, processes=config.reward.workers, timeout=config.reward.timeout)


def _sample(trajectory: Trajectory, answer: str | None) -> Sample:
    tokens = int((trajectory.versions != PROMPT_VERSION).sum())
    return Sample(trajectory.reward, dict(trajectory.components), str(trajectory.finish), tokens, answer)


def last_completion(trajectory: Trajectory) -> np.ndarray:
    """Returns the ids of the last run of sampled tokens, [T] int32: the last turn."""
    sampled = trajectory.versions != PROMPT_VERSION
    ends = np.flatnonzero(sampled)
    if not ends.size:
        return np.zeros(0, np.int32)
    end = int(ends[-1]) + 1
    given = np.flatnonzero(~sampled[:end])
    start = int(given[-1]) + 1 if given.size else 0
    return np.asarray(trajectory.token_ids[start:end])
