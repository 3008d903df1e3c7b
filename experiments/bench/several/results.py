"""The file of results, which a later call goes on from."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

from rljax.errors import UserError
from rljax.experiments.bench.several.place import Row

FILE = "results.json"


@dataclasses.dataclass
class Result:
    """Result of a case: rows of numbers, or why there are none."""

    rows: list[Row]
    seconds: float
    error: str = ""
    beside: int = 0  # the most cases that ran at the same time, on other cards of the host


class Results:
    """Results by case, kept in OUT/results.json; each is written as soon as it is there.

    Example:
        results = Results(Path("out"), {"device": "NVIDIA H200", "date": "2026-11-29"})
        results.add("learners/qwen3-0.6b fsdp:f2", Result([{"ms": 812.0}], 61.0))
    """

    def __init__(self, out: Path, machine: Row) -> None:
        """Reads what is there.

        Args:
          machine: what makes results comparable; those of another one are refused. A value of ""
            is not known to this call, and the one that is there stays.

        Raises:
          UserError: the file can't be read, or is of another machine.
        """
        self._path, self._lock = out / FILE, threading.Lock()
        self.machine, self.by_case = machine, dict[str, Result]()
        if not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_text())
            before = found["machine"]
            self.by_case = {name: Result(**fields) for name, fields in found["results"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"--out: {self._path} holds no results ({error}; remove it, or name another directory)") from None
        self.machine = machine | {key: value for key, value in before.items() if machine.get(key) == ""}
        for key in machine:
            if before.get(key) not in ("", self.machine[key]):
                raise UserError(
                    f"--out: {self._path} has results with {key} {before.get(key)!r}, and here it is {machine[key]!r}"
                    " (name another directory)"
                )

    def add(self, case: str, result: Result) -> None:
        """Keeps a case's result; one that is there already is replaced. Any thread may call it."""
        with self._lock:
            self.by_case[case] = result
            results = {name: dataclasses.asdict(each) for name, each in self.by_case.items()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside = self._path.with_suffix(".tmp")
            aside.write_text(json.dumps({"machine": self.machine, "results": results}, indent=1) + "\n")
            os.replace(aside, self._path)

    def done(self, case: str) -> bool:
        """Returns whether the case has been measured; one that failed has not."""
        return case in self.by_case and not self.by_case[case].error

    def rows(self, part: str) -> list[Row]:
        """Returns the rows of all cases of a part, each with its case's name."""
        return [
            {"case": name, "beside": result.beside, **row}
            for name, result in self.by_case.items()
            if name.startswith(f"{part}/") and not result.error
            for row in result.rows
        ]
