"""Numbered files of one split, as `datasets` names them: train-00000-of-00003.parquet."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from rljax.errors import UserError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?\.\w+")  # older ones end with a hash
_SHOWN = 3  # names in a message


def require_all_shards(files: Sequence[Path], where: str) -> None:
    """Checks that numbered files of a split are all there, and of one numbering.

    Files without such a number are left alone. Raises UserError, which begins with `where`.
    """
    found = [(match, file.name) for file in files if (match := _SHARD.fullmatch(file.name))]
    if not found:
        return
    match, name = found[0]
    count, digits = int(match["count"]), len(match["index"])
    names: dict[int, list[str]] = collections.defaultdict(list)
    for other, its_name in found:
        if other["count"] != match["count"] or int(other["index"]) >= count:
            _refuse_two(where, name, its_name)
        names[int(other["index"])].append(its_name)
    if twice := next((each for each in names.values() if len(each) > 1), None):
        _refuse_two(where, *twice[:2])
    if lacking := count - len(names):
        missing = (
            f"{match['stem']}-{i:0{digits}}-of-{match['count']}{files[0].suffix}" for i in range(count) if i not in names
        )
        shown = ", ".join(itertools.islice(missing, _SHOWN))
        more = f" and {lacking - _SHOWN} more" if lacking > _SHOWN else ""
        remedy = "download them again, or rename the files if these are all"
        raise UserError(f"{where}: {len(found)} of {count} shards; missing {shown}{more} ({remedy})")


def _refuse_two(where: str, one: str, other: str) -> None:
    remedy = "their records may be the same: move the files of one of them away"
    raise UserError(f"{where}: files of two shardings of one split, such as {one} and {other} ({remedy})")
