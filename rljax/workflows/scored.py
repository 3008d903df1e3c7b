"""Results of evaluations: from trajectories to samples with their final answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rljax.config.schema import Config
from rljax.evaluation.results import Answers, Policy, Result, Sample, ks_of
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.answers import find_parser, parse_answers
from rljax.rollout.evaluation import Episodes, reward_of
from rljax.rollout.result import Failure
from rljax.types import PROMPT_VERSION, Trajectory


def result_of(episodes: Episodes, config: Config, policy: Policy, tokenizer: Tokenizer) -> Result:
    """Returns the result of an evaluation; parses final answers where the reward can, to vote over.

    Blocks while answers are parsed.
    """
    evaluation = episodes.evaluation
    assert evaluation.protocol is not None, "its protocol is that of the result"
    by_prompt = episodes.by_prompt()
    answers = iter(_answers([parts[-1] for row in by_prompt for parts in row], config, tokenizer) or ())
    has_answers = config.evaluator.n_samples > 1 and find_parser(config.reward.name) is not None
    rows = []
    for prompt, done, row in zip(evaluation.prompts, by_prompt, episodes.results, strict=True):
        samples = [_sample(parts, next(answers, None)) for parts in done]
        failed = Counter(
            each.kind if isinstance(each, Failure) else "rejected" for each in row if each is None or isinstance(each, Failure)
        )
        rows.append(Answers(prompt.uid, samples, dict(failed)))
    ks = ks_of(config.evaluator.n_samples, config.evaluator.ks)
    return Result(policy, evaluation.name, evaluation.protocol, config.seed, ks, rows, has_answers)


def _answers(last_parts: Sequence[Trajectory], config: Config, tokenizer: Tokenizer) -> list[str | None] | None:
    """Parses the final answers of episodes; None if nothing votes over them."""
    if config.evaluator.n_samples == 1 or find_parser(config.reward.name) is None:
        return None
    texts = [tokenizer.decode(last_completion(trajectory)) for trajectory in last_parts]
    return parse_answers(texts, name=config.reward.name, processes=config.reward.workers, timeout=config.reward.timeout)


def _sample(parts: Sequence[Trajectory], answer: str | None) -> Sample:
    tokens = sum(int((part.versions != PROMPT_VERSION).sum()) for part in parts)
    names = dict.fromkeys(name for part in parts for name in part.components)
    having = {name: [part.components[name] for part in parts if name in part.components] for name in names}
    components = {name: sum(values) / len(values) for name, values in having.items()}
    return Sample(reward_of(parts), components, str(parts[-1].finish), tokens, answer)


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
