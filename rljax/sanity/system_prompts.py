"""Records with a system message of their own, before which `system_prompt` does not go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rljax.chat.messages import text_of
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt


class SystemPrompts:
    """Count of the records of a set that keep their own system message, and where the first one is.

    Example:

        own = SystemPrompts("train_dataset", "Be brief.")
        for prompt in prompts.every():
            own.add(prompt)
        findings = list(own.check(prompts.where))
    """

    def __init__(self, part: str, system_prompt: str) -> None:
        """
        Args:
          system_prompt: of the set; with an empty one, no record lacks it.
        """
        self._part, self._system_prompt = part, system_prompt
        self._first = ""  # uid
        self._own = self._count = 0

    def add(self, prompt: Prompt) -> None:
        """Takes one more prompt of the set."""
        self._count += 1
        opening = prompt.messages[0]
        if self._system_prompt and opening["role"] == "system" and text_of(opening) != self._system_prompt:
            self._first = self._first or prompt.uid
            self._own += 1

    def check(self, where: Callable[[str], str]) -> Iterator[Finding]:
        """Warns of records that go without `system_prompt`.

        Args:
          where: returns the origin of a prompt by its uid, as PromptSource.where.
        """
        if self._own:
            line = f"{self._own} of {self._count} records have a system message of their own, the first {where(self._first)}"
            remedy = f"{self._part}.system_prompt has no effect on them; take those messages out, or leave the key empty"
            yield Finding(Severity.WARNING, self._part, line, remedy)
