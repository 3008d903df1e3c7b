"""`allocation_mode`: which engine runs where.

    mode   = pool [ ("+" | "|") pool ]       "+": devices of their own; "|": the same devices
    pool   = engine [ ("." | ":") dims ]     the sampler first, then the learner
    dims   = { letter count }                in any order, each at most once; 1 if not named
    letter = d (data) | t (tensor) | p (pipeline) | c (context) | e (expert)
           | f (FSDP / ZeRO-3 shards)

    sglang:d4t1+fsdp:d4      four GPUs sample, four others learn
    jax:d2t2|jax:f4          four devices do both in turn
    jax:d1                   one pool alone is whatever its engine does: sampler and learner here,
    sglang.d4p1t1            a sampler only (serve),
    fsdp:d4p1t1              a learner only (replay)

Whether an engine samples, learns and which dims it supports is asked of its plugin; no engine is
named here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import NoReturn, Protocol

from rljax.errors import UserError

DIMS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert", "f": "fsdp"}

_ENGINE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COUNT = re.compile(r"[0-9]*")


@dataclasses.dataclass(frozen=True)
class Pool:
    """Devices of one engine.

    Example: Pool(engine="jax", data=2, tensor=2, first_device=0) is `jax:d2t2` on devices 0 to 3
    """

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    fsdp: int = 1
    first_device: int = 0

    @property
    def size(self) -> int:
        """Devices in the pool."""
        return self.data * self.tensor * self.pipeline * self.context * self.fsdp

    def __str__(self) -> str:
        """Returns the pool as `allocation_mode` has it, without dims of 1. Example: "jax:d2t2"."""
        counts = {letter: getattr(self, name) for letter, name in DIMS.items()}
        return f"{self.engine}:{''.join(f'{letter}{count}' for letter, count in counts.items() if count > 1) or 'd1'}"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Pools of the sampler and the learner; one pool named alone is both.

    Either may be None: serving has no learner, replay no sampler.
    """

    sampler: Pool | None
    learner: Pool | None

    @property
    def engines(self) -> list[str]:
        """Names of the engines, the learner's first."""
        return list(dict.fromkeys(pool.engine for pool in (self.learner, self.sampler) if pool))

    @property
    def devices(self) -> int:
        """Devices of both pools together."""
        return max(pool.first_device + pool.size for pool in (self.sampler, self.learner) if pool)

    def __str__(self) -> str:
        """Returns the shortest `allocation_mode` that means this."""
        pools = [pool for pool in (self.sampler, self.learner) if pool]
        if len(pools) == 1 or pools[0] == pools[1]:
            return str(pools[0])
        shared = pools[0].first_device == pools[1].first_device
        return f"{pools[0]}{'|' if shared else '+'}{pools[1]}"


class Abilities(Protocol):
    """The attributes of `rljax.engine.Plugin` that parsing asks for."""

    dims: str
    samples: bool
    learns: bool


def parse(text: str, abilities: Callable[[str], Abilities]) -> Allocation:
    """Reads an `allocation_mode`.

    Args:
      text: an `allocation_mode` in the grammar above.
      abilities: returns the plugin of an engine's name, and raises UserError for an unknown one:
        `rljax.engine.find_plugin`.

    Raises:
      UserError: its first line says what is wrong, the others point at the character.
    """
    pools, starts, operator = _parse_pools(text)
    plugins = []
    for pool, start in zip(pools, starts, strict=True):
        try:
            plugins.append(abilities(pool.engine))
        except UserError as error:
            _fail(text, start, str(error).removeprefix("allocation_mode: "))
        _refuse_unknown_dims(text, start, pool, plugins[-1])

    if len(pools) == 1:
        (pool,), (plugin,) = pools, plugins
        return Allocation(sampler=pool if plugin.samples else None, learner=pool if plugin.learns else None)
    (sampler, learner), (sampler_plugin, learner_plugin) = pools, plugins
    if not sampler_plugin.samples:
        _fail(text, starts[0], f"{sampler.engine} cannot sample (the sampler comes first, then the learner)")
    if not learner_plugin.learns:
        _fail(text, starts[1], f"{learner.engine} cannot learn (the sampler comes first, then the learner)")
    if operator == "|" and sampler.size != learner.size:
        _fail(text, starts[1], f"pools on the same devices need as many: {sampler.size} for {sampler}, not {learner.size}")
    if operator == "+":
        learner = dataclasses.replace(learner, first_device=sampler.size)
    return Allocation(sampler, learner)


def engines_of(text: str) -> list[str]:
    """Returns the names of the engines in an `allocation_mode`, the sampler's first.

    Raises UserError if it can't be read.
    """
    pools, _, _ = _parse_pools(text)
    return [pool.engine for pool in pools]


def _parse_pools(text: str) -> tuple[list[Pool], list[int], str]:
    """Returns the pools in order, the position of each in the text, and the operator between them.

    The operator is "" for one pool.
    """
    pool, position = _parse_pool(text, 0)
    if position == len(text):
        return [pool], [0], ""
    operator, start = text[position], position + 1
    second, position = _parse_pool(text, start)
    if position < len(text):
        _fail(text, position, "more than two pools (one samples, one learns)")
    return [pool, second], [0, start], operator


def _parse_pool(text: str, start: int) -> tuple[Pool, int]:
    """Returns one pool and the position of the operator after it, or of the end."""
    engine = _ENGINE.match(text, start)
    if engine is None:
        _fail(text, start, "expected the name of an engine")
    position = engine.end()
    if position == len(text) or text[position] in "+|":
        return Pool(engine[0]), position
    if text[position] not in ".:":
        _fail(text, position, f"expected ':' and dims after {engine[0]}")
    counts, end = _parse_dims(text, position + 1)
    return Pool(engine[0], **counts), end


def _parse_dims(text: str, position: int) -> tuple[dict[str, int], int]:
    """Returns counts by the name of their dim, and the position after them."""
    counts: dict[str, int] = {}
    while position < len(text) and text[position] not in "+|":
        letter = text[position]
        if letter not in DIMS:
            known = ", ".join(f"{key} ({name})" for key, name in DIMS.items())
            _fail(text, position, f"no dim {letter!r} (dims are {known})")
        if DIMS[letter] in counts:
            _fail(text, position, f"dim {letter} is given twice")
        digits = _COUNT.match(text, position + 1)
        assert digits is not None  # it matches the empty string
        if not digits[0] or int(digits[0]) < 1:
            _fail(text, position + 1, f"dim {letter} needs a count of at least 1, as in {letter}2")
        counts[DIMS[letter]] = int(digits[0])
        position = digits.end()
    if not counts:
        _fail(text, position, "expected dims, as in d4t2")
    return counts, position


def _refuse_unknown_dims(text: str, start: int, pool: Pool, plugin: Abilities) -> None:
    """Refuses a dim that the engine doesn't have, unless its count is 1."""
    for letter, name in DIMS.items():
        if letter not in plugin.dims and getattr(pool, name) > 1:
            position = text.index(letter, start + len(pool.engine) + 1)
            able = ", ".join(f"{key} ({DIMS[key]})" for key in plugin.dims) or "none: one device"
            _fail(text, position, f"{pool.engine} has no {name} parallelism ({letter}); it has {able}")


def _fail(text: str, position: int, reason: str) -> NoReturn:
    raise UserError(f"allocation_mode: {reason}, at character {position + 1} of {text!r}\n  {text}\n  {' ' * position}^")
