"""One pass over the prompts of a set, for all that is asked of every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljax.environments.build import FIELD
from rljax.sanity.blanks import Blanks
from rljax.sanity.findings import Finding
from rljax.sanity.prompts import Index
from rljax.sanity.system_prompts import SystemPrompts
from rljax.sanity.whole_numbers import WholeNumbers
from rljax.types import Prompt


class Survey:
    """Findings of all prompts of a set, and those of them that name an environment.

    Example:

        survey = Survey("train_dataset", learned_field(config))
        prompts = open_prompts(config.train_dataset, seed=0, seen=survey.add)
        findings = list(survey.check(prompts.where))
    """

    def __init__(
        self,
        part: str,
        learned: str | None = None,
        prompts: Iterable[Prompt] = (),
        *,
        system_prompt: str = "",
        as_text: bool = False,
    ) -> None:
        """
        Args:
          learned: the field that supervised steps learn; None without such steps.
          system_prompt: of the set's section.
          as_text: whether completions are compared with the text of gold answers (`compares_text`).
        """
        self.index, self._blanks = Index(part), Blanks(part, learned)
        self._system_prompts = SystemPrompts(part, system_prompt)
        self.as_text, self._answers = as_text, WholeNumbers(part)
        self.played: list[Prompt] = []  # prompts that name an environment
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Takes one more prompt of the set."""
        self.index.add(prompt)
        self._blanks.add(prompt)
        self._system_prompts.add(prompt)
        self._answers.add(prompt)
        if FIELD in prompt.fields:
            self.played.append(prompt)

    def check(self, where: Callable[[str], str]) -> Iterator[Finding]:
        """Finds what is empty or twice there, and records that contradict each other or the config.

        Args:
          where: returns the origin of a prompt by its uid, as PromptSource.where.
        """
        yield from self._blanks.check(where)
        yield from self._system_prompts.check(where)
        if self.as_text:
            yield from self._answers.check()
        yield from self.index.check()
