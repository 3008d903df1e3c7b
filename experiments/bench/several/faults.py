"""Cases of runs in which something is killed or stopped: each ends or goes on within its bound.

Bounds are those of docs/runtime.md and docs/processes.md, computed from the constants and the
config that the run itself uses.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rljax.config import io
from rljax.config.schema import Config
from rljax.engines.http import health
from rljax.engines.http.config import SglangConfig
from rljax.experiments.bench.several import runs
from rljax.experiments.bench.several.case import Case, cards_of
from rljax.experiments.bench.several.place import Failed, Place, Program, Row, end, seconds_since
from rljax.experiments.bench.several.processes import Loads, Spans, await_that, followers_of, servers_of, signal_all
from rljax.multiprocess import follower, leader

HANG_TIMEOUT = 480.0  # seconds: recover.hang_timeout of these runs; the default of half an hour would be waited for
BEFORE = 2  # steps before the fault, and after one that is survived
AFTER = 2
APART, SHARED = "sglang:d2+fsdp:f2", "sglang:d2|fsdp:f2"  # on four cards, and on two
OURS = "jax:d1+fsdp:f2"  # without SGLang


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that befalls a run, at a moment, and how long the run may take over it."""

    what: str
    modes: tuple[str, ...]
    moment: str  # "load" or "update"
    victims: Callable[[int], list[int]]  # processes of a run, by its own
    signal: int
    survived: bool  # the run goes on; else it ends with status 1 and says so
    bound: Callable[[Config], float]  # seconds


def server(run: int) -> list[int]:
    """Returns the processes of the last of a run's servers."""
    found = servers_of(run)
    return found[-1] if found else []


def rank(run: int) -> list[int]:
    """Returns the process of the last rank of a run's learner."""
    return followers_of(run)[-1:]


def restarted(config: Config) -> float:
    """Returns seconds until a publish is done without a server that died, and it has started again."""
    return 3 * config.control_timeout + SglangConfig.of(config).start_timeout


def lost_after(config: Config) -> float:
    """Returns seconds until a silent server is lost, and a publish has been done without it."""
    return health.SILENCE * (health.CHECK_TIMEOUT + health.INTERVAL) + 3 * config.control_timeout


def rank_lost(config: Config) -> float:
    """Returns seconds until a run has ended whose rank was killed."""
    return follower.HEARTBEAT + leader.GRACE + leader.CLOSE_TIMEOUT


FAULTS = (
    Fault(
        "kill -9 of a server between buckets",
        ("sglang:d1+fsdp:d1", APART),
        "load",
        server,
        signal.SIGKILL,
        survived=True,
        bound=restarted,
    ),
    Fault("kill -9 of a rank in an update", (OURS, SHARED, APART), "update", rank, signal.SIGKILL, False, rank_lost),
    Fault("kill -9 of a rank in a publish", (SHARED, APART), "load", rank, signal.SIGKILL, False, rank_lost),
    Fault("SIGSTOP of a server in a publish", (SHARED, APART), "load", server, signal.SIGSTOP, True, lost_after),
)


def faults(place: Place) -> Iterator[Case]:
    """Yields each fault in each of its modes."""
    for fault in FAULTS:
        for mode in fault.modes:
            yield Case("faults", f"{fault.what}, {mode}", cards_of(mode), 300.0, partial(_measure, fault, mode))


def _measure(fault: Fault, mode: str, place: Place, name: str, limit: float) -> list[Row]:
    workdir = runs.fresh(place, name)
    settings: Row = {
        "total_train_steps": 1000,
        "recover.hang_timeout": HANG_TIMEOUT,
        "sglang.bucket_mb": 1,  # many, so that a load is long
        "actor.mb_spec.rows_per_mb": 1 if place.rehearse else 8,  # as is an update then: 9 micro-batches of 0.4 s on an H200
    }
    if not place.rehearse:
        settings["sglang.extra_args"] = (*place.server_args, "--disable-cuda-graph")  # a server that starts sooner
    run = runs.start(place, name, mode, workdir, settings)
    until = time.monotonic() + limit
    try:
        _await_moment(fault, run, workdir, until)
        victims = fault.victims(run.pid)
        if not victims:
            raise Failed("the run has no such process")
        signal_all(victims, fault.signal)
        config = io.from_json((workdir / "config.json").read_text())
        bound = round(fault.bound(config), 1)
        row = {"fault": fault.what, "mode": mode, "bound_s": bound, "survived": fault.survived}
        return [row | _what_followed(fault, run, workdir, bound)]
    finally:
        signal_all(server(run.pid), signal.SIGCONT)  # what is stopped could not end
        end(run)


def _await_moment(fault: Fault, run: Program, workdir: Path, until: float) -> None:
    def alive() -> bool:
        return run.poll() is None

    def left() -> float:
        return until - time.monotonic()

    if not await_that(lambda: len(runs.metrics_of(workdir)) >= BEFORE, left(), alive):
        raise Failed(f"the run did not make {BEFORE} steps (status {run.poll()})")
    loads, spans = Loads(Path(f"{workdir}-servers")), Spans(workdir / "trace.json")
    before = loads.count()
    moments = {"load": lambda: loads.count() > before, "update": lambda: "update" in spans.open()}
    if not await_that(moments[fault.moment], left(), alive):
        raise Failed(f"no {fault.moment} was seen")


def _what_followed(fault: Fault, run: Program, workdir: Path, bound: float) -> Row:
    """Watches the run after the fault: until it has gone on, or ended, or twice the bound is over."""
    began, steps = time.monotonic(), len(runs.metrics_of(workdir))

    def went_on() -> bool:
        return len(runs.metrics_of(workdir)) >= steps + AFTER

    gone_on = await_that(went_on, 2 * bound, lambda: run.poll() is None)
    seconds = seconds_since(began)
    status = json.loads((workdir / "status.json").read_text()) if (workdir / "status.json").exists() else {}
    rows = runs.metrics_of(workdir)
    return {
        "went_on": gone_on,
        "after": AFTER,
        "step_s": statistics.median(row["timeperf/wall"] for row in rows[:steps]),
        "dropped": sum(row.get("rollout/dropped", 0) for row in rows),
        "seconds": seconds,
        "exit_status": run.poll(),
        "state": status.get("state"),
        "said": status.get("error") or "",
    }
