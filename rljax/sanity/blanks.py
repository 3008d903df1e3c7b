"""Texts that are not there: prompts that ask nothing, and answers of which only the end is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rljax.chat.messages import Message, text_of
from rljax.config.schema import Config
from rljax.environments.build import FIELD
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt

OWN_REPLY = "answer"  # the field in whose place a record's own reply is learned


class Blanks:
    """Counts of empty prompts and answers of a set, and where the first ones are.

    Example:

        blanks = Blanks("train_dataset", learned_field(config))
        for prompt in prompts.every():
            blanks.add(prompt)
        findings = list(blanks.check(prompts.where))
    """

    def __init__(self, part: str, learned: str | None = None) -> None:
        """
        Args:
          learned: the field that supervised steps learn; None without such steps.
        """
        self._part, self._learned = part, learned
        self._prompts: list[str] = []  # uids
        self._answers: list[str] = []
        self._count = 0

    def add(self, prompt: Prompt) -> None:
        """Takes one more prompt of the set."""
        self._count += 1
        if FIELD not in prompt.fields and all(_is_blank(m) for m in prompt.messages if m["role"] != "system"):
            self._prompts.append(prompt.uid)
        if self._learned is not None and self._learns_nothing(prompt, self._learned):
            self._answers.append(prompt.uid)

    def check(self, where: Callable[[str], str]) -> Iterator[Finding]:
        """Warns of what is empty.

        Args:
          where: returns the origin of a prompt by its uid, as PromptSource.where.
        """
        found = (
            ("have a prompt without text", self._prompts, "the policy is asked nothing there"),
            (
                f"have an empty {self._learned!r}",
                self._answers,
                "supervised steps learn nothing but the end of a turn from them",
            ),
        )
        for what, uids, remedy in found:
            if uids:
                line = f"{len(uids)} of {self._count} records {what}, the first {where(uids[0])}"
                yield Finding(Severity.WARNING, self._part, line, f"{remedy}; leave such records out")

    @staticmethod
    def _learns_nothing(prompt: Prompt, field: str) -> bool:
        if field == OWN_REPLY and prompt.reply:
            return all(_is_blank(message) for message in prompt.reply)
        value = prompt.fields.get(field)
        return isinstance(value, str) and not value.strip()


def learned_field(config: Config) -> str | None:
    """Returns the field that supervised steps of a config learn; None if it has none."""
    return config.warmup.field if config.actor.loss == "sft" or config.warmup.steps else None


def _is_blank(message: Message) -> bool:
    """Returns whether a message has no text, and neither pictures nor tool calls nor reasoning."""
    content = message.get("content") or ""
    shown = not isinstance(content, str) and any(part.get("type") != "text" for part in content)
    told = any(value for key, value in message.items() if key not in ("role", "content"))
    return not (text_of(message).strip() or shown or told)
