"""A planted fault: one wrong line, and the tests that should see it."""

from __future__ import annotations

import ast
import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong line.

    Example: Fault("rljax/rollout/buffer.py", "self.version += 1", "self.version += 2", BUFFER)
    """

    file: str
    old: str  # text that the file has once, or whose first occurrence is meant
    new: str
    tests: tuple[str, ...]  # arguments of pytest
    equivalent: str = ""  # why nothing can see it, if nothing can
    what: str = ""  # the kind of fault, in words; empty: the line says it

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault.

        Raises ValueError if the line is not there, SyntaxError if what is planted is no Python.
        """
        if self.old not in text:
            raise ValueError(f"{self.file} has no {self.old!r} any more: mend the line in tests/mutation")
        planted = text.replace(self.old, self.new, 1)
        ast.parse(planted, self.file)
        return planted

    def __str__(self) -> str:
        line = f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split()) or '(nothing)'}"
        return f"{self.what} | {line}" if self.what else line
