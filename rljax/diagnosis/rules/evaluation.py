"""Evaluation: whether the held-out reward measures what the run is meant to learn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rljax.config.schema import Config
from rljax.diagnosis import names
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import divergence, evaluation_size, is_same_source
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.rules.hacking import epochs_of, gains_line, is_memorized
from rljax.diagnosis.thresholds import (
    BROKEN_EVALUATION_FAILURES,
    EVALUATION_ERRORS,
    MAX_FAILURES,
    OVERFIT_EPOCHS,
    PATIENCE,
    PROTOCOL_GAP,
)


@rule(
    "evaluation.missing",
    "No held-out reward is recorded, so that learning and hacking look the same.",
    needs=(names.REWARD,),
    least=2 * PATIENCE,
    causes=("evaluator.freq_steps and evaluator.freq_epochs are None", "there is no validation set"),
    next="rljax train with evaluator.freq_steps=20 and a valid_dataset",
)
def missing(history: History) -> Sign | None:
    if history.evaluations:
        return None
    return Sign(Severity.NOTE, history.first_step, f"no {names.EVALUATION_REWARD} in {history.rl_steps} RL steps")


@rule(
    "evaluation.same_data",
    "The run is evaluated on the prompts that it is trained on.",
    causes=("valid_dataset names the training split", "the test split is used for training"),
    next="set valid_dataset.path and valid_dataset.split to prompts that no training uses",
)
def same_data(history: History) -> Sign | None:
    if not history.evaluations:
        return None
    for session in history.context:
        held_out = session.get("evaluation")
        mine, theirs = _digest(session.get("data")), _digest(held_out.get("data") if isinstance(held_out, dict) else None)
        if mine is not None and mine == theirs:
            return Sign(Severity.BROKEN, history.first_step, f"training and held-out prompts have one digest: {mine[0]}")
    if history.config is not None and _is_same_source(history.config):
        data = history.config.train_dataset
        line = f"train_dataset and valid_dataset are both {data.path}, split {data.split}"
        return Sign(Severity.BROKEN, history.first_step, line)
    return None


def _digest(data: Any) -> tuple[str, str] | None:
    """Returns the digests of prompts: of their records, and of which are kept; None without."""
    if not isinstance(data, Mapping):
        return None
    found = data.get("data"), data.get("kept")
    return (str(found[0]), str(found[1])) if all(found) else None


def _is_same_source(config: Config) -> bool:
    ours, theirs = config.train_dataset, config.valid_dataset
    if not ours.path or ours.path != theirs.path:
        return False
    held_out = {key: value for key, value in theirs.task.items() if key in ("seed", "n")}
    mine = {key: value for key, value in ours.task.items() if key in ("seed", "n")}
    return ours.split == theirs.split and held_out == mine


OF_ONE_TASK = {"seed", "n", "misled"}  # settings of a task that leave its prompts of one kind
OTHER_SAMPLING = "evaluator.temperature, top_p or top_k differ from gconfig"
OTHER_PROMPTS = "the held-out prompts are of another kind, or have another template or system prompt"
WRONG_ANSWERS = "some answers of the set with the lower score are wrong, so that right completions are not paid"
OTHER_WEIGHTS = "evaluation uses other weights than those that sample in training"


@rule(
    "evaluation.protocol",
    "Evaluations sample, ask or score otherwise than training, so that their difference is not generalization.",
    needs=(names.EVALUATION_REWARD,),
    bounds=(PROTOCOL_GAP, EVALUATION_ERRORS),
    causes=(OTHER_SAMPLING, OTHER_PROMPTS, OTHER_WEIGHTS),
    next="rljax train with evaluator.greedy=false and evaluator.temperature, top_p and top_k those of gconfig",
)
def protocol(history: History) -> Sign | None:
    """Compares a score that both record, at each evaluation with the training steps around it."""
    asking, prompts = ([], []) if history.config is None else (_other_asking(history.config), _other_prompts(history.config))
    differs = ", ".join([*asking, *prompts])
    gap = _gap(history, early=not differs)
    if gap is not None and prompts and not asking:
        found = divergence(history)  # prompts of another kind, on purpose, unless nothing of what is learned shows in them
        severity = Severity.BROKEN if found is not None and found.rises_alone else Severity.NOTE
        advice = "rljax train with the settings of train_dataset in valid_dataset"
        return Sign(severity, history.first_step, (gap.line, differs), (OTHER_PROMPTS, OTHER_WEIGHTS), advice)
    if gap is not None and differs:
        severity = Severity.NOTE if gap.mean > 0 and _is_colder(history) else Severity.BROKEN
        return Sign(severity, history.first_step, (gap.line, differs))
    if gap is not None and not _is_greedy(history) and is_same_source(history):
        causes = (
            (WRONG_ANSWERS, OTHER_PROMPTS, OTHER_WEIGHTS) if gap.mean > 0 else (OTHER_PROMPTS, OTHER_WEIGHTS, WRONG_ANSWERS)
        )
        advice = "score ten answers of the training set and ten of the held-out one by hand"
        return Sign(Severity.WARNING, history.first_step, gap.line, causes, advice)  # they sample alike
    return Sign(Severity.NOTE, history.first_step, differs) if differs else None


def _is_greedy(history: History) -> bool:
    return history.config is None or history.config.evaluator.greedy


def _is_colder(history: History) -> bool:
    """Returns whether evaluations sample at a lower temperature: they score higher then, as meant."""
    config = history.config
    return config is not None and config.evaluator.temperature < config.gconfig.temperature


def _other_asking(config: Config) -> list[str]:
    """Says how evaluations sample, or ask, otherwise than training; greedy ones are meant to."""
    ours, theirs = config.gconfig, config.evaluator
    sampled = () if theirs.greedy else ("temperature", "top_p", "top_k")
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in sampled]
    found = [f"evaluator.{name} is {a:g} and gconfig.{name} {b:g}" for name, a, b in pairs if a != b]
    mine, held_out = config.train_dataset, config.valid_dataset
    if mine.path == held_out.path and mine.system_prompt != held_out.system_prompt:
        found.append(
            f"valid_dataset.system_prompt is {held_out.system_prompt!r} and train_dataset.system_prompt {mine.system_prompt!r}"
        )
    return found


def _other_prompts(config: Config) -> list[str]:
    """Says how held-out prompts from one source are another task than those that are trained on."""
    ours, theirs = config.train_dataset, config.valid_dataset
    if ours.path != theirs.path:
        return []
    settings = [(f"task.{key}", theirs.task.get(key), ours.task.get(key)) for key in {*ours.task, *theirs.task} - OF_ONE_TASK]
    return [f"valid_dataset.{key} is {a} and train_dataset.{key} {b}" for key, a, b in sorted(settings) if a != b]


class Gap(NamedTuple):
    """Mean distance of held-out score from training score."""

    mean: float
    line: str


def _gap(history: History, *, early: bool) -> Gap | None:
    """Describes a gap between training and held-out score beyond chance; None if there is none.

    Args:
      early: look at the first third of the steps alone, where a gap is no overfit.
    """
    for ours, theirs in _comparable(history):
        train, held_out, width = history[ours], history[theirs], _width(history, ours, theirs)
        gaps, steps = [], []
        for step, value in zip(held_out.steps.tolist(), held_out.values.tolist(), strict=True):
            around = train.since(step - PATIENCE // 2).until(step + PATIENCE // 2 + 1)
            if len(around) > PATIENCE and not (early and step > train.steps[0] + len(train) // 3):
                gaps.append(value - around.mean)
                steps.append(step)
        if not gaps:
            continue
        prompts = _prompts_per_batch(history) * (PATIENCE + 1)
        error = 0.5 * width * math.sqrt((1 / evaluation_size(history) + 1 / prompts) / len(gaps))
        mean = sum(gaps) / len(gaps)
        if abs(mean) > max(PROTOCOL_GAP * width, EVALUATION_ERRORS * error):
            several = f"{len(gaps)} evaluations, steps {steps[0]} to {steps[-1]}"
            where = f"{several if len(gaps) > 1 else f'one evaluation, step {steps[0]}'}; standard error {error:.2g}"
            return Gap(mean, f"{theirs} is {mean:+.3g} from {ours} of the training steps around it ({where})")
    return None


def _comparable(history: History) -> list[tuple[str, str]]:
    """Returns the scores of training and of evaluations that mean the same, by name.

    The rewards, where they have the same components, or one range if they have none; else the
    scores that both have among their components. What a workflow counts, as turns, is no score.
    """
    ours, theirs = (
        {name.removeprefix(prefix) for name in history.names(prefix)}
        for prefix in (names.COMPONENTS, names.EVALUATION_COMPONENTS)
    )
    if ours == theirs and (ours or _same_range(history)):
        return [(names.REWARD, names.EVALUATION_REWARD)]
    return [
        (f"{names.COMPONENTS}{name}", f"{names.EVALUATION_COMPONENTS}{name}")
        for name in sorted(filter(names.is_score, ours & theirs))
    ]


def _width(history: History, *series: str) -> float:
    edges = [history[f"{name}/{edge}"] for name in series for edge in ("min", "max")]
    values = [value for edge in edges if edge for value in (edge.values.min(), edge.values.max())]
    return float(max(values) - min(values)) if values else 1.0


def _same_range(history: History) -> bool:
    """Returns whether training and held-out rewards have one range, as one reward function has."""
    for edge in ("min", "max"):
        ours, theirs = history[f"{names.REWARD}/{edge}"], history[f"{names.EVALUATION_REWARD}/{edge}"]
        if not ours or not theirs or ours.median != theirs.median:
            return False
    return True


def _prompts_per_batch(history: History) -> int:
    groups = history[names.GROUPS]
    return max(int(groups.median), 1) if groups else history.config.batch_size if history.config else 1


@rule(
    "evaluation.protocol_changed",
    "The protocol of evaluations changed within the run, so that their curve has a step that is none of the policy's.",
    causes=("the run went on with another config", "the held-out data changed on disk"),
    next="rljax doctor --diff WORKDIR OTHER; evaluate both checkpoints under one protocol",
)
def protocol_changed(history: History) -> Sign | None:
    sessions = [session for session in history.context if isinstance(session.get("evaluation"), dict)]
    for before, after in itertools.pairwise(sessions):
        keys = sorted(key for key in after["evaluation"] if after["evaluation"][key] != before["evaluation"].get(key))
        if keys:
            changes = ", ".join(f"{key} {before['evaluation'].get(key)} -> {after['evaluation'][key]}" for key in keys)
            step = int(after.get("first_step", 0)) + 1
            return Sign(Severity.BROKEN, step, f"from step {step} on: {changes}", series=("context.json",))
    return None


@rule(
    "evaluation.failed",
    "Episodes of evaluations fail and are left out of their mean: hard prompts fail more often.",
    needs=(names.EVALUATION_FAILED,),
    bounds=(MAX_FAILURES, BROKEN_EVALUATION_FAILURES),
    causes=("the reward or the workflow raises on some prompts", "servers are overloaded by valid_dataset.batch_size"),
    next="rljax rollout on the validation prompts, and read the first failure in the log",
)
def failed(history: History) -> Sign | None:
    series, size = history[names.EVALUATION_FAILED], evaluation_size(history)
    share = series.map(lambda values: values / size)
    found = share.where(share.values > MAX_FAILURES)
    if not found:
        return None
    severity = Severity.BROKEN if found.median > BROKEN_EVALUATION_FAILURES else Severity.WARNING
    line = (
        f"{found.values[0] * size:.0f} of {size} episodes failed at step {found.steps[0]}; "
        f"more than {MAX_FAILURES!r} of them in {len(found)} of {len(share)} evaluations"
    )
    return Sign(severity, max(int(found.steps[0]), history.first_step), line)


@rule(
    "evaluation.overfit",
    "Training reward goes up and held-out reward falls or stays, after several passes over the prompts: they are memorized.",
    needs=(names.REWARD, names.EVALUATION_REWARD),
    least=3,
    bounds=(OVERFIT_EPOCHS,),
    causes=("too many epochs over few prompts", "the training prompts are of another kind than the held-out ones"),
    next="go back to the checkpoint with the best evaluation; train on more prompts, or fewer epochs",
)
def overfit(history: History) -> Sign | None:
    found = divergence(history)
    if found is None or not found.rises_alone or not is_memorized(history):
        return None
    return Sign(Severity.BROKEN, found.onset, (gains_line(found), f"the prompts were passed over {epochs_of(history)} times"))


@rule(
    "evaluation.noise",
    "Evaluations are too small to see what they are for.",
    needs=(names.EVALUATION_REWARD,),
    least=3,
    causes=("evaluator.max_prompts is small",),
    next="raise evaluator.max_prompts, or evaluator.n_samples",
)
def noise(history: History) -> Sign | None:
    series, size = history.evaluations, evaluation_size(history)
    error = _width(history, names.EVALUATION_REWARD) / 2 / math.sqrt(size)
    moved = abs(series.last - float(series.values[0]))
    if moved > 2 * error:
        return None
    line = f"held-out reward moved by {moved:.3g} in all; the standard error of {size} episodes is up to {error:.2g}"
    return Sign(Severity.NOTE, int(series.steps[0]), line)


RULES: tuple[Rule, ...] = (missing, same_data, protocol, protocol_changed, failed, overfit, noise)
