"""Time of each program of the sampler: a decode step at given lengths, every prefill, a copy.

    python -m experiments.bench.decode_steps         # on a GPU: Qwen3-0.6B, 256 slots of 2,048
    python -m experiments.bench.decode_steps --shape=tiny --slots=8 --context=256 --group=4

All slots decode, and their pages lie in no order. A line of JSON per case: milliseconds per step or
dispatch, the mean of --repeats dispatches after one that is not counted; for a step also the
gigabytes of keys and values that its attention has to read. "grouped" and "ungrouped" are the same
tables: --group slots share the pages of half their tokens, and read them once or each for itself.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from rljax.config.allocation import Pool
from rljax.experiments import main
from rljax.experiments.bench.sampler_config import DIRECTORY, SHAPE, make_config, peak_gb
from rljax.experiments.bench.shapes import make_model

if TYPE_CHECKING:
    from rljax.backends.jax.decode_attention import Groups
    from rljax.engines.jax.sampling.programs import Programs

GROUP = flags.DEFINE_integer("group", 16, "Slots that share a prefix.", lower_bound=2)
REPEATS = flags.DEFINE_integer("repeats", 8, "Timed dispatches of a case.", lower_bound=1)


def tables_of(programs: Programs, shared: int) -> np.ndarray:
    """Pages for full rows, the first `shared` of them those of the slot's group."""
    fresh = np.random.default_rng(0).permutation(programs.pages).astype(np.int32)
    tables = np.full((programs.slots, programs.columns), programs.pages, np.int32)
    taken = 0
    for slot in range(programs.slots):
        first = slot // GROUP.value * GROUP.value
        common = shared if slot > first else 0
        tables[slot, :common] = tables[first, :common]
        count = programs.columns - common
        tables[slot, common:] = fresh[taken : taken + count]
        taken += count
    return tables


def orders_at(programs: Programs, positions: np.ndarray) -> np.ndarray:
    from rljax.engines.jax.sampling.orders import ORDER, START

    orders = np.zeros(programs.slots, ORDER)
    orders["action"], orders["token"], orders["position"] = START, 5, positions
    orders["limit"], orders["temperature"], orders["top_p"] = programs.context, 1.0, 1.0
    orders["seed"], orders["stop_ids"] = np.arange(programs.slots), programs.spec.vocab_size
    return orders


def milliseconds(programs: Programs, dispatch: Callable[[], Any]) -> float:
    dispatch()
    programs.wait()
    start = time.perf_counter()
    for _ in range(REPEATS.value):
        dispatch()
    programs.wait()
    return 1e3 * (time.perf_counter() - start) / REPEATS.value


def decode_case(programs: Programs, name: str, positions: np.ndarray, tables: np.ndarray, groups: Groups) -> None:
    """Times a step; every dispatch starts the slots again at `positions`."""
    orders = orders_at(programs, positions)
    ms = milliseconds(programs, lambda: programs.decode(orders, tables, groups, plain=True)) / programs.decode_steps
    size = programs.page_size
    own = positions // size + 1 - groups.own[:, 0]
    pages = int(own.sum()) + int((groups.items[:, 2] - groups.items[:, 1]).sum())
    spec, leaf = programs.spec, programs._cache[0][0]
    read = pages * size * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * leaf.dtype.itemsize
    say(name, ms, programs.slots, cache_gb=round(read / 1e9, 2))


def say(case: str, ms: float, tokens: int, **more: float) -> None:
    line = {"case": case, "ms": round(ms, 3), "tokens_per_s": round(1e3 * tokens / ms)} | more
    print(json.dumps(line), flush=True)


def measure(programs: Programs) -> None:
    from rljax.backends.jax.decode_attention import find_groups
    from rljax.engines.jax.sampling.slots import Chunk, Copy

    slots, context, random = programs.slots, programs.context, np.random.default_rng(1)
    nobody, everybody = programs.no_groups(), np.arange(slots)
    half = context // 2 // programs.page_size
    apart = tables_of(programs, 0)
    for name, positions in (
        ("all near 1/20 of the context", np.full(slots, context // 20)),
        ("all near the half", np.full(slots, context // 2 - 24)),
        ("uniform from 1/10 to 9/10", random.integers(context // 10, context * 9 // 10, slots)),
    ):
        decode_case(programs, name, positions, apart, nobody)
    together = tables_of(programs, half)
    for length in (context // 2 + context // 16, context * 3 // 4, context - context // 16):
        decode_case(programs, f"ungrouped at {length}", np.full(slots, length), together, nobody)
        groups = find_groups(together, programs.pages, everybody)
        decode_case(programs, f"grouped at {length}", np.full(slots, length), together, groups)
    for rows, width in programs.shapes:
        starts, counts = np.full(rows, min(256, context - width), np.int32), np.full(rows, width, np.int32)
        chunk = Chunk(np.arange(rows, dtype=np.int32), starts, counts, apart[:rows], np.full((rows, width), 5, np.int32))
        say(f"prefill {rows}x{width}", milliseconds(programs, functools.partial(programs.prefill, chunk)), rows * width)
    copies = [Copy(0, int(apart[i, 0]), int(apart[i, 1])) for i in range(programs.copies)]
    say(f"copy {len(copies)} pages", milliseconds(programs, lambda: programs.copy(copies)), len(copies) * programs.page_size)


def bench() -> None:
    from rljax.backends.jax.mesh import pool_mesh
    from rljax.engines.jax.sampling.programs import Programs

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(DIRECTORY.value or temporary)
        make_model(directory, SHAPE.value)
        programs = Programs(make_config(), directory, pool_mesh(Pool("jax"), sampling=True))
        start = time.perf_counter()
        programs.warm_up()
        seconds = round(time.perf_counter() - start, 1)
        print(
            json.dumps({"decode_attention": programs.attention.name, "pages": programs.pages, "warm_up_s": seconds}), flush=True
        )
        measure(programs)
        print(json.dumps({"peak_gb": peak_gb()}), flush=True)


if __name__ == "__main__":
    main.run_main(bench)
