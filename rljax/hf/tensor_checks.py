"""Checks of stored tensors by their bits: every number finite, two tensors the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from safetensors import safe_open

_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10, "bfloat16": 0xFF << 7}  # its bits
_AT_ONCE = 1 << 18  # elements that stay in the processor's cache between two passes
_PART_BYTES = 1 << 26  # of each of two tensors that are compared

Read = Callable[[tuple[slice, ...] | None], np.ndarray]


def count_not_finite(array: np.ndarray) -> int:
    """Counts NaN and infinity in an array; 0 for one of integers.

    Works on the bits: NumPy takes bfloat16 for a foreign type, and is slow with it.
    """
    exponent = _EXPONENT.get(array.dtype.name)
    if exponent is None:
        return 0
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(-1)
    mask = bits.dtype.type(exponent)
    count = 0
    for start in range(0, bits.size, _AT_ONCE):
        part = bits[start : start + _AT_ONCE] & mask
        if part.max() == mask:
            count += int(np.count_nonzero(part == mask))
    return count


def are_same(shape: tuple[int, ...], first: Read, second: Read) -> bool:
    """Returns whether two stored tensors of one shape hold the same dtype and bits.

    Args:
      first, second: read a slice of it, or all. Parts of the tensors are in memory at a time.
    """
    for index in _parts(shape):
        one, other = first(index), second(index)
        if one.dtype != other.dtype or one.tobytes() != other.tobytes():
            return False
    return True


def first_difference(first: Mapping[str, safe_open], second: Mapping[str, safe_open]) -> str | None:
    """Returns the name of a tensor that differs between two stored models, or None.

    One that only one of them has differs.

    Args:
      first, second: the open file of each tensor, by its name.
    """
    if alone := sorted(first.keys() ^ second.keys()):
        return alone[0]
    for name in sorted(first):
        one, other = first[name].get_slice(name), second[name].get_slice(name)
        if one.get_shape() != other.get_shape() or one.get_dtype() != other.get_dtype():
            return name
        if not are_same(tuple(one.get_shape()), _reader(first[name], name), _reader(second[name], name)):
            return name
    return None


def _reader(file: safe_open, name: str) -> Read:
    return lambda index: file.get_tensor(name) if index is None else file.get_slice(name)[index]


def _parts(shape: tuple[int, ...]) -> list[tuple[slice, ...] | None]:
    if not shape:
        return [None]
    row = max(int(np.prod(shape[1:])) * 4, 1)
    rows = max(_PART_BYTES // row, 1)
    return [(slice(start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows)]
