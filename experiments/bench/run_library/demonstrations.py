"""A format of the warm-up's data: demonstrations of a model that says more than it is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from rljax.data.formats import Messages, prompt_answer

OPENING = "A: "


def talkative(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Puts an opening before one demonstration in four, and dots behind another.

    "46" becomes "A: 46" or "46..": wrong by exact match, and something that rewards can pay for.
    """
    messages, fields = prompt_answer(record, where)
    number = zlib.crc32(messages[-1]["content"].encode())
    said = fields["demonstration"]
    kind, dots = number % 4, number // 4 % 3 + 1
    fields["demonstration"] = OPENING + said if kind == 0 else said + "." * dots if kind == 1 else said
    return messages, fields
