"""Names of other trainers' metrics, and the names under which rules read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rljax.diagnosis import names, run_files

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A metric of another trainer under our name."""

    pattern: str  # of the whole name, a regular expression; its first group replaces * in `name`
    name: str
    factor: float = 1.0

    @property
    def readable(self) -> str:
        """The pattern as a reader would write it: * for what may stand there."""
        return self.pattern.replace("(.+)", "*").replace(".+", "*").replace("\\d+", "*")

    def apply(self, theirs: str) -> str | None:
        """Returns our name for one of theirs; None if it is another metric."""
        match = re.fullmatch(self.pattern, theirs)
        return None if match is None else self.name.replace("*", match[1]) if match.groups() else self.name


def _spread(theirs: str, ours: str) -> tuple[Renamed, ...]:
    """Renames THEIRS/mean, /min and /max to OURS/avg, /min and /max."""
    ends = (("mean", "avg"), ("min", "min"), ("max", "max"))
    return tuple(Renamed(f"{theirs}/{end}", f"{ours}/{end_of_ours}") for end, end_of_ours in ends)


TRL = (
    Renamed("reward", names.REWARD),
    Renamed("reward_std", names.GROUP_REWARD_STD),
    Renamed("frac_reward_zero_std", names.EQUAL_REWARD_GROUPS),
    Renamed("rewards/(.+)/mean", f"{names.COMPONENTS}*"),
    Renamed("completions/mean_length", f"{names.SEQUENCE_LENGTH}/avg"),
    Renamed("completions/min_length", f"{names.SEQUENCE_LENGTH}/min"),
    Renamed("completions/max_length", f"{names.SEQUENCE_LENGTH}/max"),
    Renamed("completions/clipped_ratio", names.NO_EOS_RATIO),
    Renamed("clip_ratio/region_mean", names.CLIP_RATIO),
    Renamed("clip_ratio", names.CLIP_RATIO),
    Renamed("entropy", names.ENTROPY),
    Renamed("kl", names.REFERENCE_KL),
    Renamed("grad_norm", names.GRAD_NORM),
    Renamed("learning_rate", names.LEARNING_RATE),
    Renamed("loss", names.LOSS),
    *_spread("sampling/importance_sampling_ratio", names.BEHAVE_WEIGHT),
    Renamed("step_time", names.WALL),
    Renamed("eval_reward", names.EVALUATION_REWARD),
    Renamed("eval_rewards/(.+)/mean", "eval-reward/*"),
    Renamed("eval_completions/mean_length", f"{names.EVALUATION_LENGTH}/avg"),
)
VERL = (
    *_spread("critic/score", names.REWARD),
    *_spread("critic/rewards", names.SHAPED_REWARD),
    *_spread("critic/advantages", names.ADVANTAGE),
    *_spread("critic/returns", names.RETURN),
    *_spread("critic/values", names.VALUE),
    Renamed("critic/vf_explained_var", names.EXPLAINED_VARIANCE),
    Renamed("critic/vf_loss", names.CRITIC_LOSS),
    *_spread("response_length", names.SEQUENCE_LENGTH),
    Renamed("response_length/clip_ratio", names.NO_EOS_RATIO),
    Renamed("actor/pg_clipfrac", names.CLIP_RATIO),
    Renamed("actor/ppo_kl", names.APPROX_KL),
    Renamed("actor/entropy", names.ENTROPY),
    Renamed("actor/entropy_loss", names.ENTROPY),
    Renamed("actor/kl_loss", names.REFERENCE_KL),
    Renamed("actor/pg_loss", names.LOSS),
    Renamed("actor/grad_norm", names.GRAD_NORM),
    Renamed("actor/lr", names.LEARNING_RATE),
    Renamed("rollout_corr/kl", names.BEHAVE_LOG_RATIO, -1.0),  # theirs is of behavior to proximal policy
    Renamed("timing_s/step", names.WALL),
    Renamed("perf/cpu_memory_used_gb", names.HOST_MEMORY, GIB),
    Renamed("val-core/.+/reward/mean@\\d+", names.EVALUATION_REWARD),
    Renamed("val-aux/.+/reward/mean@\\d+", names.EVALUATION_REWARD),  # beside acc, which is core then
    Renamed("val/test_score/.+", names.EVALUATION_REWARD),
)


def _plain(name: str) -> str:
    return name


def _of_hf_trainer(name: str) -> str:
    """Undoes what the W&B and TensorBoard callbacks of the HF Trainer do to names."""
    if name.startswith("eval/"):
        return f"eval_{name.removeprefix('eval/')}"
    return name.removeprefix("train/")


@dataclasses.dataclass(frozen=True)
class Source:
    """A trainer whose logs can be read."""

    table: tuple[Renamed, ...]
    plain: Callable[[str], str] = _plain  # undoes prefixes that a logger adds

    def names_of_ours(self, seen: Iterable[str]) -> dict[str, str]:
        """Returns the trainer's names for ours: the log's, or the table's where it has not one.

        Args:
          seen: names of the log.
        """
        found = {theirs: self.rename(theirs) for theirs in seen} if self.table else {}
        sources: dict[str, list[str]] = {}
        for theirs, ours in found.items():
            if ours is not None:
                sources.setdefault(ours[0], []).append(theirs)
        names = {renamed.name: renamed.readable for renamed in reversed(self.table)}
        names |= {ours: theirs[0] for ours, theirs in sources.items() if len(theirs) == 1}
        for renamed in self.table:  # figures are in our units
            if renamed.factor != 1:
                names[renamed.name] = f"{renamed.name} ({names[renamed.name]} times {renamed.factor:g})"
        return names | {ours.removesuffix("/avg"): theirs for ours, theirs in names.items() if ours.endswith("/avg")}

    def rename(self, theirs: str) -> tuple[str, float] | None:
        """Returns our name for one of theirs, and its factor; None if no rule reads it."""
        if not self.table:
            return theirs, 1.0
        found = ((renamed.apply(self.plain(theirs)), renamed.factor) for renamed in self.table)
        return next(((name, factor) for name, factor in found if name is not None), None)


SOURCES: Mapping[str, Source] = {
    "rljax": Source(()),  # our own names
    "trl": Source(TRL, _of_hf_trainer),
    "verl": Source(VERL),
}


def detect(seen: Iterable[str]) -> str | None:
    """Returns the source that knows most of the names; None if none knows any."""
    seen = list(seen)
    own = sum(name.startswith(("rollout/", "ppo_actor/", "ppo/actor/")) for name in seen)
    known = {name: sum(source.rename(n) is not None for n in seen) for name, source in SOURCES.items() if source.table}
    best = max(known | {"rljax": own}, key=lambda name: (known | {"rljax": own})[name])
    return best if (known | {"rljax": own})[best] else None


def convert(source: Source, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Renames the metrics of rows; several that become one, as of validation sets, are averaged."""
    converted = []
    for row in rows:
        values: dict[str, list[float]] = {}
        for theirs, value in row.items():
            renamed = None if theirs == "step" else source.rename(theirs)
            if renamed is None or isinstance(value, bool) or not isinstance(value, int | float | None):
                continue
            values.setdefault(renamed[0], []).append(run_files.number_of(value) * renamed[1])
        converted.append({"step": row["step"]} | {name: sum(found) / len(found) for name, found in values.items()})
    return converted
