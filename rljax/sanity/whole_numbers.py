"""Gold answers of a column of floats that are whole: 20.0, which a policy that says 20 never earns.

pandas makes float64 of a column of integers in which one is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljax.config.schema import Config
from rljax.rewards.exact import FIELD
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt

_WHOLE = re.compile(r"-?\d+\.0")


def compares_text(config: Config) -> bool:
    """Returns whether a run's completions are compared with the text of their gold answers."""
    return config.actor.loss != "sft" and "exact" in (name.strip() for name in config.reward.name.split(","))


class WholeNumbers:
    """Counts of the gold answers of a set, and of those that are whole numbers written as floats.

    Example:

        answers = WholeNumbers("train_dataset")
        for prompt in prompts.every():
            answers.add(prompt)
        findings = list(answers.check())
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._example = ""
        self._whole = self._count = 0

    def add(self, prompt: Prompt) -> None:
        """Takes one more prompt of the set."""
        if FIELD not in prompt.fields:
            return
        self._count += 1
        if _WHOLE.fullmatch(answer := str(prompt.fields[FIELD]).strip()):
            self._whole += 1
            self._example = self._example or answer

    def check(self) -> Iterator[Finding]:
        """Warns if all gold answers are whole numbers written as floats."""
        if self._whole and self._whole == self._count:
            short = self._example.removesuffix(".0")
            line = f"column {FIELD!r} has floats that are all whole: reward exact wants {self._example!r}, and {short} earns 0"
            remedy = f"write the column as integers or text, or --config.reward.name=math, for which {short} is right"
            yield Finding(Severity.WARNING, self._part, line, remedy)
