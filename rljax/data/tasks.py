"""Tasks whose examples are made in memory: "task:addition", "task:count_objects" (pictures),
"task:reasoning_gym/<dataset>", "task:environment/<name>", "task:verifiers/<name>".

A task is a function of (split, **arguments) that returns records in the prompt_answer format.
Splits are disjoint whatever their sizes and seeds, since a question's own hash decides which split
it belongs to.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rljax.config.registry import nearest
from rljax.data.count_objects import count_objects
from rljax.data.records import InMemory
from rljax.environments import tasks, verifiers
from rljax.errors import UserError

PREFIX = "task:"
# Parts of the test split, which are disjoint: from which share of it to which
PARTS = {"smoke": (0.0, 0.1), "dev": (0.1, 0.4), "public_test": (0.4, 0.7), "private_test": (0.7, 1.0)}
SPLITS = ("train", "test", *PARTS)


def make_task(path: str, split: str, arguments: Mapping[str, Any], key: str) -> InMemory:
    """Makes the records of a task.

    Args:
      path: "task:NAME".
      split: "train", "test", or a part of the test split: "smoke", "dev", "public_test" or
        "private_test".
      arguments: `train_dataset.task`, the task's keyword arguments.
      key: the config section, for errors.

    Raises:
      UserError: unknown task, split or argument, or more examples than there are.
    """
    name = path.removeprefix(PREFIX)
    if split not in SPLITS:
        raise UserError(f"{key}.split: a task has no split {split!r} (one of {', '.join(SPLITS)})")
    try:
        family, slash, member = name.partition("/")
        if slash and family in FAMILIES:
            _check_arguments(FAMILIES[family], arguments)
            records = FAMILIES[family](member, split, **arguments)
        elif name in TASKS:
            _check_arguments(TASKS[name], arguments)
            records = TASKS[name](split, **arguments)
        else:
            families = ("reasoning_gym/<dataset>", "environment/<name>", "verifiers/<name>")
            raise UserError(f"no task {name!r} ({nearest(name, [*TASKS, *families])})")
    except UserError as error:
        raise UserError(f"{key}: {path}: {error}") from error.__cause__
    return InMemory(path, records)


def addition(split: str, *, digits: int = 2, n: int | None = None, seed: int = 0, misled: float = 0.0) -> list[dict[str, Any]]:
    """Sums of two numbers of exactly `digits` digits: "12+34=" and "46".

    Args:
      n: number of examples; None for all sums of the split (a tenth of all sums is test).
      seed: decides which examples, and their order.
      misled: share of the records whose field "demonstration" is one more than the answer, "47"; in
        the others it is the answer. A policy that learned from these demonstrations is right in
        1 - misled of its samples.
    """
    if not 0 <= misled <= 1:
        raise UserError(f"misled: a share in [0, 1], not {misled}")
    if not 1 <= digits <= 9:
        raise UserError(f"digits must lie in [1, 9], not {digits}")
    low, high = (10 ** (digits - 1) if digits > 1 else 0), 10**digits
    width = high - low
    total = width * width
    if n is None and digits > 3:
        raise UserError(f"n: say how many of the {total:.0e} sums of {digits} digits")
    share = _share_of(split, test_share=0.1)
    draw = total if n is None else min(total, int(n / share * 1.3) + 1000)
    records = []
    generator = random.Random(seed)
    for pair in generator.sample(range(total), draw):
        a, b = low + pair // width, low + pair % width
        question, answer = f"{a}+{b}=", str(a + b)
        demonstration = str(a + b + (generator.random() < misled))
        if is_in(question, split, test_share=0.1):
            records.append({"prompt": question, "answer": answer, "demonstration": demonstration})
        if len(records) == n:
            break
    return _enough(records, n, split)


def reasoning_gym(dataset: str, split: str, *, n: int = 1000, seed: int = 0, **arguments: Any) -> list[dict[str, Any]]:
    """A dataset of the reasoning-gym package by name.

    The reward "reasoning_gym" scores with the dataset's own scorer.

    Args:
      n: number of examples.
      seed: seed of the generator.
      arguments: settings of the dataset's own config, e.g. `min_digits`.
    """
    size = int(2 * n / _share_of(split, test_share=0.5)) + 200
    made = make_reasoning_gym(dataset, {"size": size, "seed": seed, **arguments})
    records = []
    for index in range(len(made)):
        entry = made[index]
        if is_in(entry["question"], split, test_share=0.5):
            scorer = {"dataset": dataset, "arguments": {"size": len(made), "seed": seed, **arguments}, "index": index}
            records.append({"question": entry["question"], "answer": str(entry["answer"]), "reasoning_gym": scorer})
        if len(records) == n:
            break
    return _enough(records, n, split)


def make_reasoning_gym(dataset: str, arguments: Mapping[str, Any]) -> Any:
    """Makes the package's dataset object.

    Raises UserError for a name or an argument it does not have.
    """
    import reasoning_gym as package
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise UserError(f"reasoning_gym has no dataset {dataset!r} ({nearest(dataset, DATASETS)})")
    try:
        return package.create_dataset(dataset, **arguments)
    except (TypeError, ValueError, AssertionError) as error:  # how the package refuses its arguments
        raise UserError(f"task arguments refused: {' '.join(str(error).split())}") from error


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "addition": addition,
    "count_objects": count_objects,
    **tasks.TASKS,
}
FAMILIES: dict[str, Callable[..., list[dict[str, Any]]]] = {  # of (member, split, **arguments)
    "environment": tasks.environment,
    "reasoning_gym": reasoning_gym,
    "verifiers": verifiers.examples,
}


def _check_arguments(task: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises UserError for an argument that the task does not have, or of another type."""
    parameters = inspect.signature(task).parameters.values()
    checks_the_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(task)
    for name, value in arguments.items():
        if name in known:
            wanted = typing.get_args(hints[name]) or (hints[name],)
            if not (type(value) in wanted or (float in wanted and type(value) is int)):
                kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in wanted)
                raise UserError(f"task argument {name}: {value!r} is of type {type(value).__name__}, not {kinds}")
        elif not checks_the_rest:
            raise UserError(f"no task argument {name!r} ({nearest(name, known)})")


def is_in(question: str, split: str, *, test_share: float) -> bool:
    """Returns whether a question is in a split, which its hash alone decides.

    Args:
      test_share: share of all questions that is in the test split; the rest is in train.
    """
    place = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") / 2**64 / test_share
    if split == "train":
        return place >= 1.0
    low, high = PARTS.get(split, (0.0, 1.0))
    return low <= place < high


def _share_of(split: str, *, test_share: float) -> float:
    """Returns the share of all questions that is in a split."""
    low, high = PARTS.get(split, (0.0, 1.0))
    return 1.0 - test_share if split == "train" else (high - low) * test_share


def _enough(records: list[dict[str, Any]], n: int | None, split: str) -> list[dict[str, Any]]:
    if n is not None and (n < 1 or len(records) < n):
        raise UserError(f"n: {n} examples asked for, but split {split} gives between 1 and {len(records)}")
    return records
