"""Fields of a checkpoint's loop.json: state of the loop and of the buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.json_fields import OBJECT, REAL, TEXT, fields, integer, listed, named, number, optional

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
        "pending": listed(_TICKET),
    },
    needed=("version", "drawn", "consumed", "counts", "source", "pending"),
)
_ACCUMULATOR = fields(
    {"counts": named(REAL), "values": named(listed(REAL)), "shares": named(listed(_COUNT, 2))},
    needed=("counts", "values"),
)
_STATE = fields(
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


def read(path: Path) -> dict[str, Any]:
    """Reads loop.json. Raises OSError, or UserError if a field is missing or of another kind."""
    state = json_fields.read_object(path, {})
    json_fields.demand(state, _STATE, str(path))
    return state
