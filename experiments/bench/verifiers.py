"""Measures what the rewards gsm8k and math score wrongly, by shape of the answer.

    python -m experiments.bench.verifiers --gsm8k=data/gsm8k

math is tried on gold answers of the shapes of MATH and on forms in which models write answers, each
with completions that are right and that are wrong (verifier_cases.py, verifier_forms.py). gsm8k is
tried on the labeled solutions of GSM8K: each is right for its own question, and wrong for the next
one that has another answer; so are the same answers in other forms that models write.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from rljax.experiments import main

GSM8K = flags.DEFINE_string("gsm8k", None, "Directory with train.jsonl and test.jsonl of GSM8K; unset: its rows are left out.")
SPLIT = flags.DEFINE_string("split", "test", "Split of GSM8K.")
CASES = flags.DEFINE_bool("cases", False, "Print each completion that is scored wrongly.")

FORMS: dict[str, Callable[[str, str], str]] = {
    "the labeled solution": lambda solution, final: solution,
    "`\\boxed{18}`": lambda solution, final: f"{_reasoning(solution)}\nTherefore the answer is $\\boxed{{{final}}}$.",
    "`The answer is $18.`": lambda solution, final: f"{_reasoning(solution)}\nThe answer is ${final}.",
    "`**Answer: 1,018**`": lambda solution, final: f"{_reasoning(solution)}\n\n**Answer: {_with_commas(final)}**",
    "`#### 18.00 dollars`": lambda solution, final: (
        f"{_reasoning(solution)}\n#### {final}{'' if '.' in final else '.00'} dollars"
    ),
}


class Row(NamedTuple):
    """Counts for one shape."""

    shape: str
    right: int  # completions that are right
    missed: int  # of them, those that earn 0
    wrong: int  # completions that are wrong
    passed: int  # of them, those that earn 1
    errors: tuple[str, ...]  # what was scored wrongly


def measure() -> None:
    start = time.perf_counter()
    rows = list(math_rows())
    if GSM8K.value:
        rows += gsm8k_rows(Path(GSM8K.value) / f"{SPLIT.value}.jsonl")
    print("| answers | right | missed | wrong | passed |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.shape} | {row.right} | {row.missed} | {row.wrong} | {row.passed} |")
        if CASES.value and row.errors:
            print("\n".join(row.errors))
    print(f"{time.perf_counter() - start:.0f} s")


def math_rows() -> Iterator[Row]:
    """Yields a row for each shape of answers of MATH, and for each form in which models write one."""
    from rljax.experiments.bench.verifier_cases import SHAPES
    from rljax.experiments.bench.verifier_forms import FORMS as WRITTEN
    from rljax.rewards.mathematics import reward

    for shape, cases in (SHAPES | WRITTEN).items():
        right = [(case.gold, text) for case in cases for text in case.right]
        wrong = [(case.gold, text) for case in cases for text in case.wrong]
        yield _row(f"math: {shape}", lambda gold, text: _score(reward, "answer", gold, text), right, wrong)


def gsm8k_rows(path: Path) -> Iterator[Row]:
    """Yields a row for each form of the answers of GSM8K."""
    from rljax.data.formats import gsm8k
    from rljax.rewards.mathematics import gsm8k_reward

    records = [gsm8k(json.loads(line), f"{path}:{n}")[1] for n, line in enumerate(path.read_text().splitlines(), start=1)]
    for name, form in FORMS.items():
        right = [(record["final"], form(record["answer"], record["final"])) for record in records]
        golds = [gold for gold, _ in right]
        wrong = [(golds[i - 1], text) for i, (gold, text) in enumerate(right) if golds[i - 1] != gold]
        yield _row(f"gsm8k: {name}", lambda gold, text: _score(gsm8k_reward, "final", gold, text), right, wrong)


def _row(
    shape: str,
    score: Callable[[str, str], float],
    right: Sequence[tuple[str, str]],
    wrong: Sequence[tuple[str, str]],
) -> Row:
    missed = [f"  missed: gold {gold!r}, completion {text[-80:]!r}" for gold, text in right if score(gold, text) != 1]
    passed = [f"  passed: gold {gold!r}, completion {text[-80:]!r}" for gold, text in wrong if score(gold, text) != 0]
    return Row(shape, len(right), len(missed), len(wrong), len(passed), (*missed, *passed))


def _score(reward: Callable[..., dict[str, float]], field: str, gold: str, text: str) -> float:
    from rljax.errors import Rejected
    from rljax.types import Prompt

    try:
        return reward(Prompt("0/0", ({"role": "user", "content": "?"},), {field: gold}), text)["reward"]
    except Rejected:  # the gold answer is not understood: no sample of it is scored
        return -1.0


def _reasoning(solution: str) -> str:
    return solution.rpartition("\n#### ")[0]


def _with_commas(final: str) -> str:
    whole, point, rest = final.partition(".")
    return f"{int(whole):,}{point}{rest}" if whole.lstrip("-").isdigit() else final


if __name__ == "__main__":
    main.run_main(measure)
