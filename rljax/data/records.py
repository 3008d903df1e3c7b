"""Files as random-access records, the data sources that grain reads from.

A file is checked as a whole when it is opened.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rljax import json_fields
from rljax.config.files import unexpanded
from rljax.data.shards import require_all_shards
from rljax.errors import UserError

KINDS = "a directory with train.jsonl and test.jsonl, a .jsonl, .parquet or .arrow file, or what datasets' save_to_disk wrote"
SUFFIXES = (".jsonl", ".parquet", ".arrow")
_KIND = {".parquet": "a parquet", ".arrow": "an Arrow"}


class Records(Protocol):
    """Data source for grain: JSON-like objects, each with the place it came from."""

    digest: str  # hash of the content, the same in a resumed run

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """Returns the origin of record `index` for an error: "train.jsonl:17"."""
        ...


class JsonLines:
    """A memory-mapped .jsonl file: lines stay on disk, with 16 bytes per line in memory.

    Empty lines are no records.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.digest = hashlib.blake2b(self._bytes, digest_size=16).hexdigest()
        starts, numbers = [], []
        start = 0
        if self._bytes[: len(codecs.BOM_UTF8)] == codecs.BOM_UTF8:  # Windows' mark of UTF-8
            start = len(codecs.BOM_UTF8)
            self._bytes.seek(start)
        for number, line in enumerate(iter(self._bytes.readline, b""), start=1):
            if line.strip():
                starts.append(start)
                numbers.append(number)
                _parse_line(line, f"{path}:{number}")
            start += len(line)
        self._starts = np.array(starts, np.int64)
        self._numbers = np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        return _parse_line(self._bytes[start : end if end >= 0 else len(self._bytes)], self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


class Table:
    """A .parquet or .arrow file as a table in memory or mapped.

    Values that JSON does not have (dates, decimals) become text; bytes that are no UTF-8 become
    None. Of nanoseconds what is below a microsecond is left out.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._path = path
        try:
            self._table = _in_microseconds(_read_arrow(path) if path.suffix == ".arrow" else _read_parquet(path))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not {_KIND[path.suffix]} file: {' '.join(str(error).split())}") from error
        _require_different(self._table.column_names, path)
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._table.slice(int(index), 1)
        try:
            return dict(json.loads(json.dumps(row.to_pylist()[0], default=_json_of_value)))
        except (ValueError, TypeError, OverflowError, LookupError) as error:  # a date that Python does not have, say
            raise UserError(
                f"{self.where(index)}: can't be read: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def where(self, index: int) -> str:
        return f"{self._path}: row {index + 1}"


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    _require_different(pyarrow.parquet.read_schema(path).names, path)  # of several columns by a name, none can be read
    return pyarrow.parquet.read_table(path)


def _require_different(columns: Sequence[str], where: Path) -> None:
    """Raises UserError for a column name that stands twice: which of the two would be read?"""
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{where}: two columns are called {twice!r} (rename one, or leave it out)")


def _read_arrow(path: Path) -> Any:
    """Reads an Arrow stream, as `datasets` writes it, or an Arrow file (Feather)."""
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        return pyarrow.ipc.open_stream(mapped).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(mapped).read_all()


def _in_microseconds(table: Any) -> Any:
    """Casts the columns of nanoseconds, which `datetime` does not have and pandas writes."""
    import pyarrow

    for index, field in enumerate(table.schema):
        kind = field.type
        if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
            coarser = pyarrow.timestamp("us", tz=kind.tz)
        elif pyarrow.types.is_duration(kind) and kind.unit == "ns":
            coarser = pyarrow.duration("us")
        else:
            continue
        table = table.set_column(index, field.name, table.column(index).cast(coarser, safe=False))
    return table


def _json_of_value(value: Any) -> str | None:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")  # text, by a writer that does not say so
    except UnicodeDecodeError:
        return None


class InMemory:
    """Records that a task has made."""

    def __init__(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        self._name = name
        self._records = list(records)
        text = json.dumps(self._records, sort_keys=True)
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._records[index]

    def where(self, index: int) -> str:
        return f"{self._name}: example {index}"


class Joined:
    """Several files, one after another, as one."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.digest = hashlib.blake2b("".join(p.digest for p in parts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, offset = self._locate(index)
        return part[offset]

    def where(self, index: int) -> str:
        part, offset = self._locate(index)
        return part.where(offset)

    def _locate(self, index: int) -> tuple[Records, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[number], int(index - (self._ends[number - 1] if number else 0))


def open_records(path: str, split: str, key: str) -> Records:
    """Opens the records of a file, or of a split in a directory.

    Args:
      path: a .jsonl, .parquet or .arrow file, a directory with SPLIT.jsonl, SPLIT.parquet or
        SPLIT-*.parquet, or a directory of `datasets`' save_to_disk.
      key: the config section that names it, "train_dataset", for errors.

    Raises:
      UserError: when the path is missing, a file is empty, or a line is not a JSON object.
    """
    if not path:
        raise UserError(f"{key}.path: not set ({KINDS})")
    files = _files(Path(path), split, key)
    parts: list[Records] = []
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{key}.path: empty file: {file}")
        parts.append(JsonLines(file) if file.suffix == ".jsonl" else Table(file))
    records = parts[0] if len(parts) == 1 else Joined(parts)
    if not len(records):
        raise UserError(f"{key}.path: no records in {files[0]}")
    return records


def _files(path: Path, split: str, key: str) -> list[Path]:
    if path.is_dir():
        for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
            if found := sorted(path.glob(pattern)):
                require_all_shards(found, f"{key}.path: {path}")
                return found
        if saved := _saved_files(path, split, key):
            return saved
        names = sorted(found.name for found in path.iterdir())
        of_a_kind = ", ".join(name for name in names if Path(name).suffix in SUFFIXES)
        there = "there: " + (of_a_kind or f"no {', '.join(sorted(SUFFIXES))} file") if names else "it is empty"
        raise UserError(f"{key}.path: {path} has no {split}.jsonl or {split}.parquet ({there}; split is {key}.split)")
    if not path.exists():
        raise UserError(f"{key}.path: no such file: {path} ({unexpanded(path)}{KINDS}; nothing is fetched from a hub)")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{key}.path: {path} is neither .jsonl nor .parquet nor .arrow ({KINDS})")
    return [path]


def _saved_files(path: Path, split: str, key: str) -> list[Path]:
    """Returns the files of a saved Dataset, or of a DatasetDict's split; else none."""
    if (path / "dataset_dict.json").is_file():
        splits = _names_of(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise UserError(f"{key}.path: {path} has no split {split!r} (there: {', '.join(splits)}; split is {key}.split)")
        path = path / split
    if not (path / "state.json").is_file():
        return []
    state = _json_of(path / "state.json")
    if state.get("_indices_data_files"):
        raise UserError(f"{key}.path: {path} has rows selected by an index (save it again with flatten_indices())")
    files = [path / name for name in _names_of(path / "state.json", "_data_files", "filename")]
    for file in files:
        if file.suffix not in SUFFIXES:
            raise UserError(f"{key}.path: {path / 'state.json'} names {file.name}, which is no .arrow file")
        if not file.is_file():
            raise UserError(f"{key}.path: {path / 'state.json'} names {file.name}, which is not there")
    return files


def _json_of(path: Path) -> dict[str, Any]:
    return json_fields.read_object(path, {})


def _names_of(path: Path, key: str, within: str = "") -> list[str]:
    """Returns the list of names under a key, or those under `within` in a list of objects.

    Raises UserError.
    """
    entries = _json_of(path).get(key)
    listed = entries if isinstance(entries, list) else [None]
    found = [entry.get(within) if within and isinstance(entry, dict) else entry for entry in listed]
    names = [name for name in found if isinstance(name, str)]
    if len(names) < len(listed):
        raise UserError(f"{path}: {key} is no list of names (save_to_disk of datasets writes one)")
    return names


class _Twice(Exception):
    """A key that stands twice in a JSON object, of which json takes the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8") from None
    try:
        record = _DECODER.decode(text.rstrip("\r\n"))  # columns are those of this line
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except _Twice as twice:
        raise UserError(f"{where}: the key {twice.args[0]!r} stands twice in an object (leave one out)") from None
    except RecursionError:
        raise UserError(f"{where}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # a number of more than 4300 digits
        raise UserError(f"{where}: not JSON that can be read: {str(error).partition(';')[0]}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON {type(record).__name__}, not an object")
    if "\\u" in text:  # the only way to a surrogate that has no partner: UTF-8 has none
        _require_text(record, where)
    return record


def _require_text(record: Any, where: str) -> None:
    """Raises UserError if a text in the record has a lone surrogate, which no UTF-8 can hold."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not text: the surrogate {error.object[error.start]!a} stands alone") from None
