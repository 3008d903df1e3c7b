"""Prompts of training and validation: duplicates, contradictions, and what both sets share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rljax.environments.build import FIELD
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt

ANSWER = "answer"  # the field that two records of one question should agree on
MANY = 0.1  # share of the validation prompts from which on sharing is an error
WORTH_A_WARNING = 0.01  # share of duplicates from which on they are more than a note


class Index:
    """Prompts of one set by what they ask: the messages, whatever their spacing and case.

    Example:

        train = Index("train_dataset", prompts)
        findings = [*train.check(), *shared(train, Index("valid_dataset", others))]
    """

    def __init__(self, part: str, prompts: Iterable[Prompt] = ()) -> None:
        self.part = part
        self.first: dict[bytes, str] = {}  # digest of the messages -> uid of the first prompt that has them
        self.again: dict[bytes, list[str]] = {}  # and of the others, where there are any
        self._answers: dict[bytes, int] = {}  # hash of the first one's answer
        self._contradicted: dict[bytes, None] = {}  # digests with several answers, in order
        self.count = 0
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Takes one more prompt of the set."""
        key = digest_of(prompt.messages, prompt.fields.get(FIELD))
        self.count += 1
        if key in self.first:
            self.again.setdefault(key, []).append(prompt.uid)
        else:
            self.first[key] = prompt.uid
        if ANSWER in prompt.fields:
            answer = prompt.fields[ANSWER]
            said = hash(answer if isinstance(answer, str) else json.dumps(answer, sort_keys=True, default=str))
            if self._answers.setdefault(key, said) != said:
                self._contradicted[key] = None

    def uids(self, key: bytes) -> list[str]:
        """Returns the uids of the prompts with a digest, in order."""
        return [self.first[key], *self.again.get(key, ())] if key in self.first else []

    def check(self) -> Iterator[Finding]:
        """Finds duplicates within the set, and those with different answers."""
        again, several = self.count - len(self.first), self._contradicted
        if several:
            first = _index_of(self.first[next(iter(several))])
            line = f"{len(several)} prompts have records with different answers, as example {first}"
            yield Finding(Severity.WARNING, self.part, line, "one of them is wrong, or the prompt leaves out what decides")
        if again:
            alike = self.uids(next(iter(self.again)))
            line = f"{again} of {self.count} prompts are duplicates, as examples {', '.join(map(_index_of, alike[:3]))}"
            severity = Severity.WARNING if again > WORTH_A_WARNING * self.count else Severity.NOTE
            yield Finding(severity, self.part, line, "they weigh more in training, or in the score")
        if not again and not several:
            yield Finding(Severity.GOOD, self.part, f"{self.count} prompts, all different")


def shared(train: Index, held_out: Index) -> Iterator[Finding]:
    """Finds prompts that are in both sets: on them, an evaluation measures memory."""
    both = [key for key in held_out.first if key in train.first]
    part = f"{train.part}, {held_out.part}"
    if not both:
        yield Finding(Severity.GOOD, part, "no prompt is in both")
        return
    count = sum(len(held_out.uids(key)) for key in both)
    examples = f"example {_index_of(held_out.first[both[0]])} is {_index_of(train.first[both[0]])} of training"
    severity = Severity.ERROR if count >= MANY * held_out.count else Severity.WARNING
    line = f"{count} of {held_out.count} validation prompts are also trained on: {examples}"
    yield Finding(severity, part, line, "take them out of one of the sets")


def digest_of(messages: Iterable[Mapping[str, Any]], environment: Any = None) -> bytes:
    """Hashes messages; text that differs in white space or case alone has one digest.

    Args:
      environment: name, seed and arguments of the environment behind the prompt, which decide what
        is asked; None without one.
    """
    digest = hashlib.blake2b(json.dumps(environment, sort_keys=True, default=str).encode(errors="replace"), digest_size=12)
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
        digest.update(f"{message['role']}\0{' '.join(text.lower().split())}\0".encode(errors="replace"))
    return digest.digest()


def _index_of(uid: str) -> str:
    return uid.partition("/")[2] or uid
