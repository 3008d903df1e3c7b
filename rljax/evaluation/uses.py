"""Record of every use of a split: a score that was looked at before is no longer out of sample.

WORKDIR/evaluations/uses.jsonl has one object per evaluation of one set, in training or by
experiments.evaluate:

    {"time": 1764.., "purpose": "training", "name": "", "split": "test", "step": 40, ...}
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.errors import UserError
from rljax.evaluation.protocol import Protocol

FILE = "uses.jsonl"


class Role(enum.StrEnum):
    """Purpose of a split, which its name tells."""

    TRAIN = "train"
    SMOKE = "smoke"  # a few prompts, to see that the evaluation runs
    DEV = "dev"  # to choose by: checkpoints, hyperparameters
    PUBLIC_TEST = "public test"  # to report; anyone can look at it
    PRIVATE_TEST = "private test"  # to report once, of a policy that is chosen already


ROLES = {
    "train": Role.TRAIN,
    "smoke": Role.SMOKE,
    **dict.fromkeys(("dev", "valid", "val", "validation"), Role.DEV),
    **dict.fromkeys(("test", "public_test", "public"), Role.PUBLIC_TEST),
    **dict.fromkeys(("private_test", "private"), Role.PRIVATE_TEST),
}


def role_of(split: str) -> Role:
    """Returns the role of a split by its name; DEV if the name says nothing."""
    return ROLES.get(split, Role.DEV)


def is_test(split: str) -> bool:
    """Returns whether a split is there to report a score, not to choose by it."""
    return role_of(split) in (Role.PUBLIC_TEST, Role.PRIVATE_TEST)


@dataclasses.dataclass(frozen=True)
class Use:
    """One evaluation of one set."""

    purpose: str  # training: in a run; best: in a run that chose its best checkpoint by it; evaluate: the binary
    name: str  # of the set
    split: str
    data: str  # digest of the data
    protocol: str  # digest of the protocol
    step: int | None  # finished steps of the policy, if known
    policy: str  # digest or address of the policy; empty for the policy of the run at that step
    time: float = 0.0  # seconds since 1970


def record(folder: Path, uses: Sequence[Use]) -> None:
    """Appends uses to the record in a folder of results. Raises UserError if it can't be written."""
    path = folder / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            if _is_torn(path):
                file.write("\n")  # else the next line would be lost with the torn one
            for use in uses:
                file.write(json.dumps(dataclasses.asdict(dataclasses.replace(use, time=use.time or time.time()))) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _is_torn(path: Path) -> bool:
    """Returns whether a file ends within a line, as a kill leaves it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read(folder: Path) -> list[Use]:
    """Reads the record in a folder of results; lines that are not whole are left out."""
    path = folder / FILE
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [use for line in lines if (use := _use(line)) is not None]


def _use(line: str) -> Use | None:
    try:
        return json_fields.read_as(Use, json.loads(line), FILE)
    except (ValueError, RecursionError, UserError):
        return None


@dataclasses.dataclass(frozen=True)
class History:
    """Earlier uses of one split of one data set."""

    split: str
    evaluations: int  # of this split, in training and by the binary
    policies: int  # different ones among them
    chose_best: bool  # a checkpoint was chosen by it

    @property
    def warning(self) -> str:
        """One line if scores of this split are no longer out of sample, and should be; else empty."""
        if not is_test(self.split) or not (self.chose_best or self.policies > 1):
            return ""
        why = "the best checkpoint was chosen by it" if self.chose_best else f"{self.policies} policies were evaluated on it"
        return (
            f"split {self.split} is a test split, and {why} ({self.evaluations} evaluations in uses.jsonl): what is chosen by"
            " a score makes it optimistic (choose on a dev split, and report one that nothing was chosen by)"
        )

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"role": str(role_of(self.split)), "warning": self.warning}


def history(uses: Sequence[Use], split: str, data: str) -> History:
    """Sums up the uses of a split of a data set."""
    of_it = [use for use in uses if (use.split, use.data) == (split, data)]
    named = [use for use in of_it if use.policy]  # of any run: several may have one folder of results
    steps = {use.step for use in of_it if not use.policy} - {use.step for use in named}
    policies = len({use.policy for use in named}) + len(steps)
    return History(split, len(of_it), policies, any(use.purpose == "best" for use in of_it))


def use_of(purpose: str, name: str, protocol: Protocol, *, step: int | None, policy: str = "") -> Use:
    """Returns the use that an evaluation by a protocol is, now."""
    data = protocol.data.get("data")
    return Use(purpose, name, protocol.split, str(data), protocol.digest, step, policy, time.time())
