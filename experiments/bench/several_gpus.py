"""Both paths across the GPUs of one host: learners, samplers, runs, publishes, faults.

    python -m experiments.bench.several_gpus --out=OUT --model=DIR --sglang_python=PYTHON
    python -m experiments.bench.several_gpus --out=OUT --part=learners --cards=2 --minutes=9
    python -m experiments.bench.several_gpus --out=OUT --rehearse --part=learners,runs    # on a CPU

The parts:

    learners  a step of the same eight rows on one card and on several: loss, speed, memory
    samplers  256 and 1,024 requests of experiments.bench.decode
    runs      20 asynchronous steps of the config smollm2_sums (--model) in each allocation_mode
    publish   from each learner to one, two and four servers, idle and while they decode
    faults    kill -9 of servers and ranks, SIGSTOP of a server, at chosen moments
    move      a run that goes to the other path and back

It says first what it will do, how long that takes by estimate, and what it leaves out for want of
cards or of SGLang. Each result is kept in OUT/results.json as soon as it is there: the same command
again goes on with what is missing or failed. --minutes starts no case that would end later, and
--cards leaves out what takes more. --side_by_side runs cases at the same time, each on cards of its
own, those of fewer cards first: they share the host, which the table says. At the end it checks all
results that are there (each is equal to one card's, nothing is lost, faults end within their
bounds), writes OUT/table.md for docs/benchmarks.md and OUT/checks.txt, and exits with status 1 if
anything is wrong. Logs are in OUT/logs.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from rljax.chips import chip_of
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.bench.several.case import LARGEST, LIMIT, PARTS, Case, needs_sglang
from rljax.experiments.bench.several.cases import cases
from rljax.experiments.bench.several.checks import Finding, check
from rljax.experiments.bench.several.place import (
    SERVER_ARGS_ON_A_CARD,
    SERVER_ARGS_ON_CPU,
    Failed,
    Place,
    Row,
    end,
    seconds_since,
)
from rljax.experiments.bench.several.results import Result, Results
from rljax.experiments.bench.several.side_by_side import side_by_side
from rljax.experiments.bench.several.table import markdown

OUT = flags.DEFINE_string("out", None, "Directory for results, table, checks and logs.", required=True)
SCRATCH = flags.DEFINE_string("scratch", "/tmp/rljax-several-gpus", "Directory for models and run directories.")
PART = flags.DEFINE_list("part", list(PARTS), f"Parts to do: {', '.join(PARTS)}.")
ONLY = flags.DEFINE_string("only", "", "Part of the name of the cases to do, as in fsdp:f2; empty: all.")
CARDS = flags.DEFINE_integer("cards", None, "Most cards that a case may take; unset: those that are here.", lower_bound=1)
MINUTES = flags.DEFINE_float("minutes", None, "Start no case that would, by its estimate, end later than this.", lower_bound=0)
MODEL = flags.DEFINE_string("model", "", "HF directory of SmolLM2-135M-Instruct, for runs; empty: a small one from scratch.")
PYTHON = flags.DEFINE_string("sglang_python", "", "The interpreter that has SGLang; empty: its cases are left out.")
SERVER_ARGS = flags.DEFINE_list("server_args", None, "Flags of sglang.launch_server; unset: what the offline bundle needs.")
SIDE_BY_SIDE = flags.DEFINE_bool("side_by_side", False, "Run cases at the same time, each on cards of its own.")
REHEARSE = flags.DEFINE_bool("rehearse", False, "Tiny shapes on the CPU: eight forced devices, gloo in place of NCCL.")
PACKAGES = ("jax", "torch")


def bench() -> None:
    for part in PART.value:
        if part not in PARTS:
            raise UserError(f"--part: no {part!r} ({', '.join(PARTS)})")
    names = ["cpu"] * LARGEST if REHEARSE.value else card_names()
    place = place_of(names)
    results = Results(place.out, machine(names[0]))
    todo = say_plan(place, results)
    began = time.monotonic()

    def may_begin(case: Case) -> bool:
        return MINUTES.value is None or seconds_since(began) + case.seconds <= 60 * MINUTES.value

    left = measure_all(todo, place, results, may_begin)
    if left:
        print(f"--minutes: {len(left)} case{'s' if len(left) > 1 else ''} left; the same command goes on", flush=True)
    conclude(place.out, results)


def measure_all(todo: list[Case], place: Place, results: Results, may_begin: Callable[[Case], bool]) -> list[Case]:
    """Measures cases in their order, or as cards become free. Returns those not begun."""
    if SIDE_BY_SIDE.value:
        cards = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(place.cards)))).split(",")[: place.cards]

        def on_cards(case: Case, taken: tuple[str, ...], beside: Callable[[], int]) -> None:
            measure(case, dataclasses.replace(place, visible=taken), results, beside)

        try:
            return side_by_side(todo, cards, may_begin, on_cards)
        finally:
            for program in place.programs:  # of threads that an interrupt does not reach
                end(program)
    for index, case in enumerate(todo):
        if not may_begin(case):
            return todo[index:]
        measure(case, place, results)
    return []


def card_names() -> list[str]:
    """Returns the names of the GPUs of this host. Raises UserError if there is none."""
    question = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        raise UserError("no GPU is here: nvidia-smi finds none (--rehearse does it all in small on a CPU)") from None
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = names[: len(visible.split(","))]
    if not names:
        raise UserError("no GPU is here (--rehearse does it all in small on a CPU)")
    return names


def place_of(names: Sequence[str]) -> Place:
    """Returns the place that the flags describe. Raises UserError for a model that is none."""
    model = Path(MODEL.value).absolute() if MODEL.value else None
    if model is not None and not (model / "config.json").is_file():
        raise UserError(f"--model: no config.json in {model} (a Hugging Face directory)")
    args = SERVER_ARGS_ON_CPU if REHEARSE.value else SERVER_ARGS_ON_A_CARD
    chip = chip_of("H200" if REHEARSE.value else names[0])
    place = Place(
        out=Path(OUT.value).absolute(),
        scratch=Path(SCRATCH.value).absolute(),
        cards=min(len(names), CARDS.value or len(names)),
        model=model,
        sglang_python=PYTHON.value,
        server_args=args if SERVER_ARGS.value is None else tuple(SERVER_ARGS.value),
        chip=chip.name if chip is not None else "",
        rehearse=REHEARSE.value,
    )
    for folder in (place.out, place.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    return place


def machine(device: str) -> Row:
    """Returns what makes results comparable, and is said beside them."""
    versions = [f"Python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)]
    sglang = ""
    if PYTHON.value:
        from rljax.engines.http.launcher import installed_release

        sglang = ".".join(map(str, installed_release(PYTHON.value)))
    return {"device": device, "rehearsed": REHEARSE.value, "versions": ", ".join(versions), "SGLang": sglang}


def say_plan(place: Place, results: Results) -> list[Case]:
    """Prints what will be done, what is done and what is left out. Returns the cases to do."""
    wanted = [case for case in cases(place) if case.part in PART.value and ONLY.value in case.what]
    if not wanted:
        raise UserError(f"--only: no case of {', '.join(PART.value)} has {ONLY.value!r} in its name")
    print(f"{results.machine['device']}, {place.cards} of them; {results.machine['versions']}")
    todo: list[Case] = []
    for case in wanted:
        if case.cards > place.cards:
            said = f"left out: takes {case.cards} cards"
        elif needs_sglang(case) and not place.sglang_python:
            said = "left out: needs SGLang (--sglang_python)"
        elif results.done(case.name):
            said = "done"
        else:
            said = f"about {case.seconds / 60:.0f} min" if not place.rehearse else "to do"
            todo.append(case)
        print(f"  {case.name:60s} {said}")
    whole = "" if place.rehearse else f", about {sum(case.seconds for case in todo) / 60:.0f} minutes"
    print(f"{len(todo)} of {len(wanted)} cases to do{whole}", flush=True)
    return todo


def measure(case: Case, place: Place, results: Results, beside: Callable[[], int] = int) -> None:
    """Measures a case and keeps its result, or why there is none."""
    print(f"\n== {case.name}{f' (cards {place.visible})' if place.visible else ''}", flush=True)
    began = time.monotonic()
    limit = LIMIT * max(case.seconds, 300.0 if place.rehearse else 0.0)
    try:
        rows, error = case.measure(place, case.name, limit), ""
    except (Failed, UserError, OSError, ValueError, KeyError) as failure:  # one case must not lose the others
        rows, error = [], f"{type(failure).__name__}: {failure}" if not isinstance(failure, Failed) else str(failure)
    results.add(case.name, Result(rows, seconds_since(began), error, beside()))
    whose = f"{case.name}: " if place.visible else ""
    print(f"   {whose}{error or f'{len(rows)} results'} ({seconds_since(began):.0f} s; {place.log_of(case.name)})", flush=True)


def conclude(out: Path, results: Results) -> None:
    """Writes table and checks, and prints them. Raises UserError if anything is wrong."""
    rows = {part: results.rows(part) for part in PARTS}
    machine = results.machine | {"date": datetime.date.today().isoformat()}
    (out / "table.md").write_text(markdown(machine, rows))
    findings = check(rows, rehearsed=results.machine["rehearsed"])
    findings += [Finding(name, "measured", False, each.error) for name, each in results.by_case.items() if each.error]
    (out / "checks.txt").write_text("".join(f"{finding}\n" for finding in findings))
    print(f"\n{(out / 'table.md').read_text()}\n{(out / 'checks.txt').read_text()}", end="", flush=True)
    wrong = [finding for finding in findings if finding.ok is False]
    if wrong:
        raise UserError(f"{len(wrong)} of {len(findings)} checks failed, the first of them {wrong[0].case}, {wrong[0].what}")


if __name__ == "__main__":
    main.run_main(bench)
