"""Cases of learners, samplers and publishing, by the benchmarks beside this folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rljax.config.allocation import parse
from rljax.engine import find_plugin
from rljax.experiments.bench.several.case import Case, cards_of
from rljax.experiments.bench.several.place import Place, Row

FSDP = ("fsdp:d1", "fsdp:f2", "fsdp:c2", "fsdp:f4", "fsdp:f2t2", "fsdp:f8")
JAX = ("jax:d1", "jax:f2", "jax:f4", "jax:f2t2", "jax:f8")
LARGE = ("fsdp:f4", "jax:f4", "fsdp:f8", "jax:f8")  # of 8B: one card does not hold it
SAMPLERS = ("jax:d1", "jax:d2", "jax:t2", "jax:d4", "sglang:d1", "sglang:d2", "sglang:t2", "sglang:d4")
PUBLISHES = (
    *("jax:d1+jax:d1", "jax:d2+jax:f2", "jax:d4+jax:f4"),
    *("sglang:d1|fsdp:d1", "sglang:d1+fsdp:d1", "sglang:d2|fsdp:f2", "sglang:d2+fsdp:f2", "sglang:d4+fsdp:f4"),
    *("sglang:d1+jax:d1", "sglang:d2+jax:f2", "sglang:d4+jax:f4"),
)
ROWS, TOKENS, SEGMENTS = 8, 16384, 16  # of a step: a row for each of eight cards, and the same rows on fewer
TINY_TOKENS, TINY_SEGMENTS = 256, 4


def row_shape(place: Place) -> tuple[int, int, int]:
    """Returns rows, tokens per row and trajectories per row of a learner's step."""
    return (ROWS, TINY_TOKENS, TINY_SEGMENTS) if place.rehearse else (ROWS, TOKENS, SEGMENTS)


def learners(place: Place) -> Iterator[Case]:
    """Yields a step of eight rows on one card and on several, for each shape of a model."""
    if place.rehearse:
        yield from (_learner("tiny", mode, 60.0) for mode in (*FSDP, *JAX))
        return
    for shape, step in (("qwen3-0.6b", 4.0), ("qwen3-1.7b", 11.0)):  # seconds of a step on one card
        yield from (_learner(shape, mode, 50.0 + 6 * step / cards_of(mode)) for mode in (*FSDP, *JAX))
    yield from (_learner("qwen3-8b", mode, 150.0 + 6 * 50.0 / cards_of(mode)) for mode in LARGE)


def _learner(shape: str, mode: str, seconds: float) -> Case:
    return Case("learners", f"{shape} {mode}", cards_of(mode), seconds, partial(_measure_learner, shape, mode))


def _measure_learner(shape: str, mode: str, place: Place, name: str, limit: float) -> list[Row]:
    engine, dims = mode.split(":")
    rows, tokens, segments = row_shape(place)
    directory = place.scratch / shape
    flags = [f"--engine={engine}", f"--dims={dims}", f"--shape={shape}", f"--directory={directory}", f"--rows={rows}"]
    flags += [f"--tokens={tokens}", f"--segments={segments}", f"--repeats={1 if place.rehearse else 3}"]
    flags += ["--dtype=float32"] if place.rehearse else []
    found = place.lines_of(name, "learner", flags, limit)
    return [row | {"mode": mode, "planned_gb": _planned(place, mode, shape)} for row in found]


def _planned(place: Place, mode: str, shape: str) -> float | None:
    """Returns the plan's estimate of a device's peak, GB; None where it has none."""
    from rljax.errors import UserError
    from rljax.experiments.bench.several.planned import learner_gb

    try:
        return round(learner_gb(mode, shape, f"{place.chip}:{cards_of(mode)}", *row_shape(place)), 3)
    except UserError:
        return None


def samplers(place: Place) -> Iterator[Case]:
    """Yields the requests of the decode benchmark, on one card and on several."""
    for mode in SAMPLERS:
        measure = partial(_measure_sampler, mode)
        yield Case("samplers", mode, cards_of(mode), 200.0 if mode.startswith("sglang") else 110.0, measure)


def _measure_sampler(mode: str, place: Place, name: str, limit: float) -> list[Row]:
    engine, dims = mode.split(":")
    flags = [f"--engine={engine}", f"--dims={dims}", *_server_flags(place, "sglang_device", engine)]
    if place.rehearse:
        flags += ["--shape=tiny", "--requests=8", "--requests=24", "--slots=8", "--shortest=4", "--longest=32", "--context=128"]
        flags += ["--dtype=float32", f"--directory={place.scratch / 'tiny-decode'}", "--runs=1"]
    else:
        flags += ["--requests=256", "--requests=1024", "--runs=2", f"--directory={place.scratch / 'qwen3-0.6b'}"]
        pool = parse(mode, find_plugin).sampler
        shared = pool.data if pool is not None and engine == "jax" else 1  # a server has as many slots for itself
        flags += [f"--slots={256 * shared}"]
    found: dict[int, Row] = {}
    for row in place.lines_of(name, "decode", flags, limit):
        found[row["requests"]] = row | {"mode": mode}  # the last run of each number: the first warms caches
    return list(found.values())


def publishes(place: Place) -> Iterator[Case]:
    """Yields publishes to idle servers and to servers that decode 256 requests."""
    for mode in PUBLISHES:
        for size in ("tiny",) if place.rehearse else ("0.6b", "1.7b"):
            seconds = 260.0 if "sglang" in mode else 90.0
            yield Case("publish", f"{size} {mode}", cards_of(mode), seconds, partial(_measure_publish, size, mode))


def _measure_publish(size: str, mode: str, place: Place, name: str, limit: float) -> list[Row]:
    flags = [f"--modes={mode}", f"--sizes={size}", f"--repeats={1 if place.rehearse else 5}"]
    flags += _server_flags(place, "device", mode) or (["--device=cpu"] if place.rehearse else [])
    flags += ["--bucket_mb=1"] if place.rehearse else []
    rows: list[Row] = []
    for decoding in (0, 4 if place.rehearse else 256):
        rows += place.lines_of(name, "publish", [*flags, f"--decoding={decoding}"], limit / 2)
    return rows


def _server_flags(place: Place, device: str, engine: str) -> list[str]:
    """Returns flags of the benchmarks for servers of SGLang; none where the mode has none."""
    if "sglang" not in engine:
        return []
    found = [f"--sglang_python={place.sglang_python}", f"--server_args={','.join(place.server_args)}"]
    return [*found, f"--{device}=cpu"] if place.rehearse else found
