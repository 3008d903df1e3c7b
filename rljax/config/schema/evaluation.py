"""Keys of evaluations: how often, with which samples, and what the scores choose."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, key


@dataclasses.dataclass(frozen=True)
class FrequencyConfig:
    """Interval in steps, in epochs or in both; never if both are None."""

    freq_steps: int | None = key(None, "Interval in steps. None: not by steps.", POSITIVE)
    freq_epochs: int | None = key(None, "Interval in epochs. None: not by epochs.", POSITIVE)


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on the validation sets, during a run and by `experiments.evaluate`."""

    n_samples: int = key(1, "Completions per prompt.", POSITIVE)
    temperature: float = key(1.0, "Divides the logits.", POSITIVE)
    top_p: float = key(1.0, "Probability mass of the most likely tokens to sample from. 1: all tokens.", HALF_OPEN_UNIT)
    top_k: int = key(0, "Number of most likely tokens to sample from. 0: all.", NOT_NEGATIVE)
    greedy: bool = key(True, "Take the most likely token.")
    max_new_tokens: int | None = key(None, "Longest completion. None: gconfig.max_new_tokens.", POSITIVE, unit="tokens")
    max_prompts: int | None = key(None, "Prompts per evaluation and set. None: the whole set.", POSITIVE)
    success: float = key(1.0, "Least reward of a sample that passes, for pass@k.")
    ks: tuple[int, ...] = key((), "The k of pass@k and maj@k. Empty: 1, 2, 4, ... up to n_samples.")
    # Its scores are of several versions then, and don't repeat to the bit
    overlap: bool = key(False, "Train on while an evaluation runs; eval-rollout/version says which weights it saw.")
    best: str | None = key(
        None,
        "Metric of the evaluation that the best checkpoint has the most of, as eval-rollout/reward: each evaluation is saved, "
        "and the best is kept, and exported to WORKDIR/best at the end. None: checkpoints are saved by `saver` alone.",
    )
