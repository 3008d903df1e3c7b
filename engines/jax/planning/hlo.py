"""Searches of what a compiler says: of a compiled program's text for kernels, for collectives, and
for operations that make something as large as nothing but an update in place should; of a refusal
for the memory that the program would need.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
# A name goes on with numbers, and from jax 0.11 also with the argument that the kernel writes to.
_KERNEL = re.compile(r'^\s*(?:ROOT )?%?(\w+)(?:\.[\w.-]+)? = .*custom_call_target="tpu_custom_call"', re.MULTILINE)
_CUDNN = re.compile(r'custom_call_target="__(cudnn)\$(\w+)"')
_TRITON = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*\bname = "(\w+)"')
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")
_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\}\))\}")  # of {1}: (0, {}), or {}: (5, {})
_ALIASED = re.compile(r"\{(\d*)\}: \(")
_NEEDED = re.compile(r"total memory required .*?\((\d+(?:\.\d+)?)([KMG])\)")  # in libtpu's words
_CALLED = re.compile(r"calls=%?([\w.-]+)")

_MAKES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
_UPDATES = {"scatter", "dynamic-update-slice"}


class Instruction(NamedTuple):
    name: str
    operation: str
    elements: int  # of the largest array of its result that has not the memory of an operand
    is_root: bool  # the result of its computation
    rest: str  # operands and attributes


def kernels(text: str) -> Mapping[str, int]:
    """Counts Pallas kernels and those of cuDNN by name, each call that stands in the text."""
    found = [*_KERNEL.findall(text), *_TRITON.findall(text), *("_".join(pair) for pair in _CUDNN.findall(text))]
    return collections.Counter(found)


def collectives(text: str) -> Mapping[str, int]:
    """Counts collectives by kind, each call that stands in the text."""
    return collections.Counter(_COLLECTIVE.findall(text))


def needed(refusal: str) -> float | None:
    """Returns the bytes, arguments included, that a program would need according to libtpu's
    refusal of it; None where it does not say.

    Example: needed("... total memory required for HLO temporaries (1.5M) ...") == 1.5 * 2**20
    """
    found = _NEEDED.search(refusal)
    return None if found is None else float(found[1]) * 1024.0 ** ("KMG".index(found[2]) + 1)


def large_operations(text: str, elements: int) -> list[str]:
    """Names what makes an array of at least so many elements: all but other names of what is there,
    and updates in place.
    """
    computations = _computations(text)
    fused = set(_CALLED.findall(text))
    return [
        f"{each.name} ({each.operation})"
        for name, instructions in computations.items()
        if name not in fused
        for each in instructions
        if each.elements >= elements and each.operation not in _MAKES_NOTHING and not _updates(each, computations)
    ]


def _updates(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> bool:
    """Tells whether the result takes the memory of an operand, though its line does not say so."""
    if instruction.operation == "fusion" and (called := _CALLED.search(instruction.rest)):
        return any(each.is_root and each.operation in _UPDATES for each in computations[called.group(1)])
    return instruction.operation in _UPDATES


def _computations(text: str) -> Mapping[str, list[Instruction]]:
    """Instructions of each computation of a module, by its name."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line:
            current = found.setdefault(line.removeprefix("ENTRY ").split()[0].lstrip("%"), [])
        elif match := _INSTRUCTION.match(line):
            root, name, result, operation, rest = match.groups()
            current.append(Instruction(name, operation, _elements(result, rest), root is not None, rest))
    return found


def _elements(result: str, rest: str) -> int:
    """Elements of the largest array of a result, less those that take the memory of an operand."""
    aliasing = _ALIASING.search(rest)
    aliased = set(_ALIASED.findall(aliasing.group(1))) if aliasing else set()
    sizes = (math.prod(map(int, filter(None, dims.split(",")))) for dims in _ARRAY.findall(result))
    return max((size for index, size in enumerate(sizes) if str(index) not in aliased and "" not in aliased), default=0)
