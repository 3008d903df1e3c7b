"""Shapes of reward functions, told apart by the names of their parameters.

    (prompt, completion)                                        rljax's: a Prompt, text
    (prompt, completion, prompt_ids, completion_ids, **data)    AReaL's: text and token ids
    (prompts, completions, **columns)                           TRL's: lists, of a whole group
    (data_source, solution_str, ground_truth, extra_info)       verl's compute_score

What a function takes beyond that are fields of the record by name. A function without **data is
given only those that it names, and one without a default has to be in every record.

rljax's own goes by the number of parameters, so that (p, c) is one, too. Names that say something
else at their place, as (response, answer), are refused.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rljax.config import registry
from rljax.errors import UserError
from rljax.rewards.score import REWARDS, Sampled
from rljax.types import Prompt

F = TypeVar("F", bound=Callable[..., Any])

TRAINERS = frozenset(("trainer_state", "log_extra", "log_metric", "environments"))  # what TRL passes beside the columns
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
RIGHT = frozenset(  # names of what a right answer is compared with
    ("answer", "answers", "gold", "golden", "ground_truth", "label", "labels", "reference", "solution", "target", "truth")
)
ASKED = frozenset(("prompt", "question", "problem", "query", "record", "example", "messages"))
WRITTEN = frozenset(("completion", "response", "output", "generation", "prediction", "pred", "predicted", "reply"))
TAKES_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def reads(*fields: str, check: Callable[[Prompt], None] | None = None) -> Callable[[F], F]:
    """Declares which fields of a record a reward reads, so that every record is checked at start.

    Example:

        @reads("answer")
        def reward(prompt, completion):
            return float(prompt.fields["answer"] in completion)

    Args:
      check: called with each prompt before the run starts; raises ValueError for one that the
        reward can't score.
    """

    def declare(function: F) -> F:
        function.reads, function.check = fields, check  # type: ignore[attr-defined]
        return function

    return declare


class Sample(NamedTuple):
    """A completion to be scored."""

    completion: str  # text without special tokens
    sampled: Sampled | None  # only where the reward reads it


class Call(NamedTuple):
    """Arguments of one call of a reward function."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]


class Fault(NamedTuple):
    """Reason why a reward can't score completions of a prompt."""

    reason: str
    lacks_field: bool  # else a field holds what it can't read


@dataclasses.dataclass(frozen=True)
class Shape:
    """Calling convention of reward functions."""

    signature: str  # for messages
    fills: frozenset[str]  # parameters that are no fields of the record
    calls: Callable[[Prompt, Sequence[Sample]], list[Call]]  # keywords may have more than a function takes
    at_once: bool = False  # one call for all samples of a prompt, which returns a list


def _rljax(prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
    return [Call((prompt, sample.completion), {}) for sample in samples]


def _rljax_by_name(prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
    return [Call((), {"prompt": prompt, "completion": sample.completion}) for sample in samples]


def _areal(prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
    data = {name: value for name, value in _columns(prompt).items() if name not in AREAL.fills}
    calls = []
    for completion, sampled in samples:
        if sampled is None:
            raise ValueError(
                f"the workflow passes no token ids of {completion[:40]!r} to the reward (Rewards.score, `sampled`)"
            )
        ids = (sampled.prompt_text, sampled.completion_text, sampled.prompt_ids, sampled.completion_ids)
        calls.append(Call(ids, data))
    return calls


def _trl(prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
    conversational = isinstance(prompt.fields.get("prompt"), list)
    messages = [dict(message) for message in prompt.messages]
    question = messages if conversational else messages[-1]["content"]
    texts = [sample.completion for sample in samples]
    keywords: dict[str, Any] = {
        name: [value] * len(samples) for name, value in _columns(prompt).items() if name not in TRL.fills
    }
    keywords["prompts"] = [question] * len(samples)
    keywords["completions"] = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    keywords["completion_ids"] = [sample.sampled.completion_ids if sample.sampled else None for sample in samples]
    return [Call((), keywords)]


def _verl(prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
    fields = {"extra_info": {}, **prompt.fields}
    return [Call((), fields | {"solution_str": sample.completion}) for sample in samples]


def _columns(prompt: Prompt) -> dict[str, Any]:
    """Returns the columns of a record as AReaL and TRL pass them on."""
    return {"messages": [dict(message) for message in prompt.messages], **prompt.fields}


RLJAX = Shape("(prompt, completion)", frozenset(("prompt", "completion")), _rljax)
BY_NAME = Shape("(*, prompt, completion)", RLJAX.fills, _rljax_by_name)  # the same
AREAL = Shape(
    "(prompt, completion, prompt_ids, completion_ids, **data)",
    frozenset(("prompt", "completion", "completions", "prompt_ids", "completion_ids")),
    _areal,
)
TRL = Shape(
    "(prompts, completions, **columns)",
    frozenset(("prompt", "prompts", "completion", "completions", "completion_ids")),
    _trl,
    at_once=True,
)
VERL = Shape("(data_source, solution_str, ground_truth, extra_info)", frozenset(("solution_str", "extra_info")), _verl)
SHAPES = (RLJAX, AREAL, TRL, VERL)  # for messages


@dataclasses.dataclass(frozen=True)
class Reward:
    """A reward function that a config names, and how it is called."""

    name: str  # of its component where there are several rewards
    function: Callable[..., Any]
    shape: Shape
    parameters: frozenset[str]  # names of its parameters
    takes_any: bool  # has **data
    reads: tuple[str, ...]  # fields that a record must have
    check: Callable[[Prompt], None] | None

    @property
    def is_async(self) -> bool:
        function = self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def reads_ids(self) -> bool:
        """True if it has to be given token ids."""
        return self.shape is AREAL or "completion_ids" in self.parameters

    def calls(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Call]:
        """Returns the calls that score these samples of a prompt.

        Raises ValueError if it reads token ids and there are none.
        """
        if self.reads_ids and any(sample.sampled is None for sample in samples):
            raise ValueError(f"{self.name} reads token ids, and the workflow gives none (rljax.rewards.score.score does)")
        calls = self.shape.calls(prompt, samples)
        if self.takes_any:
            return calls
        return [Call(args, {n: v for n, v in keywords.items() if n in self.parameters}) for args, keywords in calls]

    def fault(self, prompt: Prompt) -> Fault | None:
        """Returns why it can't score completions of a prompt; None if it can, as far as is known."""
        missing = [field for field in self.reads if field not in prompt.fields]
        if missing and self.shape is TRL and missing[0] in TRAINERS:
            reason = f"{self.name} takes {missing[0]}, which TRL's trainer has and rljax does not (give it a default)"
            return Fault(reason, lacks_field=True)
        if missing:
            has = ", ".join(prompt.fields) or "none"
            return Fault(f"{self.name} reads the field {missing[0]!r}, and the record has: {has}", lacks_field=True)
        try:
            if self.check is not None:
                self.check(prompt)
        except ValueError as error:
            return Fault(f"{self.name}: {error}", lacks_field=False)
        return None


def find_rewards(names: Sequence[str]) -> list[Reward]:
    """Imports the rewards that a config names.

    Raises:
      UserError: one is not there, is a class, or its parameters are of no shape, or of several.
    """
    functions = [registry.resolve("reward.name", name, REWARDS, "reward") for name in names]
    short = [name if name in REWARDS else name.rpartition(":")[2] for name in names]
    labels = [name if short.count(label) > 1 else label for name, label in zip(names, short, strict=True)]
    found = zip(names, labels, functions, strict=True)
    return [_reward(name, label, function) for name, label, function in found]


def _reward(name: str, label: str, function: Callable[..., Any]) -> Reward:
    if inspect.isclass(function):
        of = name.rpartition(":")[0] or "its module"
        raise UserError(
            f"reward.name: {name} is a class, and a reward is called with completions (name an instance of it: "
            f"`score = {function.__name__}()` in {of}, and {of}:score)"
        )
    declared, check = getattr(function, "reads", None), getattr(function, "check", None)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return Reward(label, function, RLJAX, frozenset(), False, declared or (), check)
    shape = _shape_of(name, parameters)
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in TAKES_ANY and p.name not in shape.fills
    ]
    fields = tuple(required) if shape not in (RLJAX, BY_NAME) else ()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return Reward(label, function, shape, frozenset(parameters), takes_any, declared or fields, check)


def _shape_of(name: str, parameters: Mapping[str, inspect.Parameter]) -> Shape:
    """Returns the shape of a function with these parameters. Raises UserError."""
    has = set(parameters)
    positional = [p for p in parameters.values() if p.kind in POSITIONAL]
    own = {p.name for p in parameters.values() if p.name in RLJAX.fills and p.kind is not p.POSITIONAL_ONLY}
    others = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    required = [p for p in positional if p.default is p.empty]
    names = tuple(p.name for p in positional)
    lists = {"prompts", "completions"} & has
    fits = {
        VERL: "solution_str" in has,
        AREAL: "prompts" not in has and names[2:4] == ("prompt_ids", "completion_ids"),
        TRL: (bool(lists) or "completion_ids" in has) and not {"prompt", "completion", "prompt_ids"} & has,
        BY_NAME: own == RLJAX.fills and {p.name for p in (*required, *others)} <= own and not own <= set(names),
        # By number alone, as (p, c), unless a name is that of another shape
        RLJAX: len(required) <= 2 <= len(positional) and not others and not (lists | {"completion_ids", "solution_str"} & has),
    }
    found = [shape for shape, fit in fits.items() if fit]
    signature = inspect.Signature(list(parameters.values()))
    shapes = ", ".join(shape.signature for shape in SHAPES)
    odd = _misnamed(names) if found == [RLJAX] else None
    if odd is not None:
        raise UserError(
            f"reward.name: {name} takes {signature}, and would be called as "
            f"{RLJAX.signature} by position, which {odd!r} contradicts (name its parameters as one of: {shapes})"
        )
    if len(found) == 1:
        return found[0]
    which = f"may be {' or '.join(shape.signature for shape in found)}" if found else "is none of the shapes of a reward"
    raise UserError(f"reward.name: {name} takes {signature}, which {which} (name its parameters as one of: {shapes})")


def _misnamed(names: Sequence[str]) -> str | None:
    """Returns the first positional parameter that is named for something else than it is given.

    The first is given a Prompt, the second a completion, and the others keep their defaults: no
    field of the record is passed by its name.
    """
    first, second, *others = (name.lower() for name in names)
    kept = [name for name in others if name in RIGHT]
    wrong = [first] * (first in WRITTEN | RIGHT) + [second] * (second in ASKED | RIGHT) + kept
    return wrong[0] if wrong else None
