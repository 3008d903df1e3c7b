"""A checkpoint's loop.json: state of the loop and of the buffer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.json_fields import OBJECT, REAL, TEXT, fields, integer, listed, named, number, optional


@dataclasses.dataclass(frozen=True, slots=True)
class LoopState:
    """State of the loop between two steps, beside learner and buffer. All fields are JSON values.

    Example: LoopState(supervised_steps=20, epochs=1, labeled={"position": 320, "seed": 0},
    accumulator={"counts": {"generated_tokens": 96}, "values": {"reward": [1.0]}, "shares": {}},
    written={"finished": 64, "rejected": 1}, guard={"lr_factor": 0.5, "undone": [[4, 7]]})
    """

    supervised_steps: int  # finished
    epochs: int  # finished
    labeled: dict[str, Any] | None  # position in the labeled examples; None without such
    accumulator: Mapping[str, Any]  # `Accumulator.state`: metrics that no step has reported
    written: Mapping[str, int]  # the buffer's counts that the metrics have
    guard: Mapping[str, Any] | None = None  # `GuardActions.state`; checkpoints from before there were rollbacks lack it


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Content of loop.json.

    Example: Saved(loop=LoopState(...), book={"version": 12, "drawn": 110, ...}, ready=3)
    """

    loop: LoopState
    book: Mapping[str, Any]  # `Buffer.state`
    ready: int  # number of groups in ready.journal

    def to_json(self) -> str:
        loop = {field.name: getattr(self.loop, field.name) for field in dataclasses.fields(LoopState)}
        if self.loop.guard is None:
            del loop["guard"]
        return json.dumps(loop | {"book": self.book, "ready": self.ready})

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Reads loop.json. Raises OSError, or UserError if a field is missing or of another kind."""
        content = json_fields.read_object(path, {})
        json_fields.demand(content, _CONTENT, str(path))
        known = {field.name: content[field.name] for field in dataclasses.fields(LoopState) if field.name in content}
        return cls(LoopState(**known), content["book"], content["ready"])


_COUNT = integer(0, 2**62)
_PROMPT = fields(
    {
        "uid": TEXT,
        "fields": OBJECT,
        **dict.fromkeys(("messages", "tools", "reply"), listed(OBJECT)),
        "chat_template_kwargs": OBJECT,
    },
    needed=("uid", "fields"),  # releases before had no more
)
_TICKET = fields({"index": _COUNT, "prompt": _PROMPT, "attempt": _COUNT, "failures": _COUNT})
_BOOK = fields(
    {
        **dict.fromkeys(("version", "undone", "drawn", "consumed"), _COUNT),
        "counts": named(_COUNT),
        "source": OBJECT,
        **dict.fromkeys(("pending", "dropped"), listed(_TICKET)),
    },
    needed=("version", "drawn", "consumed", "counts", "source", "pending"),
)
_ACCUMULATOR = fields(
    {"counts": named(REAL), "values": named(listed(REAL)), "shares": named(listed(_COUNT, 2))},
    needed=("counts", "values"),
)
_CONTENT = fields(
    {
        "book": _BOOK,
        "ready": _COUNT,
        "supervised_steps": _COUNT,
        "epochs": _COUNT,
        "labeled": optional(OBJECT),
        "accumulator": _ACCUMULATOR,
        "written": named(_COUNT),
        "guard": fields({"lr_factor": number(0, 1), "undone": listed(listed(_COUNT, 2))}),
    },
    needed=("book", "ready", "supervised_steps", "epochs", "labeled", "accumulator", "written"),
)
