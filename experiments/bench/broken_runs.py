"""Runs with one fault each, and healthy ones, to judge the doctor by.

    python -m experiments.bench.broken_runs --list
    python -m experiments.bench.broken_runs --run=lr_x100 --seed=1 --workdir=runs/lr_x100
    python -m experiments.bench.broken_runs --all --jobs=32 --out=runs/library
    python -m experiments.bench.broken_runs --judge=tests/data/runs
    python -m experiments.bench.broken_runs --live=tests/data/runs

--run makes one run, and first the model that it starts from (two minutes, once). --all makes every
run with seeds 1 and 2 and keeps OUT/tuning.jsonl.xz, OUT/judging.jsonl.xz and OUT/runs.log.
--judge asks the doctor about kept runs and prints the page docs/doctor_table.md; --live asks about
the healthy ones as they went on (a minute).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

LIST = flags.DEFINE_bool("list", False, "Lists the runs.")
RUN = flags.DEFINE_string("run", None, "Name of one run to make.")
SEED = flags.DEFINE_integer("seed", 1, "With --run: its seed.", lower_bound=0)
WORKDIR = flags.DEFINE_string("workdir", None, "With --run: directory of the run.")
MODELS = flags.DEFINE_string("models", "runs/broken_runs_models", "With --run: directory of the models that runs start from.")
ALL = flags.DEFINE_bool("all", False, "Makes all runs.")
ONLY = flags.DEFINE_list("only", [], "With --all: names of the runs to make.")
OUT = flags.DEFINE_string("out", None, "With --all: directory for what is kept.")
SCRATCH = flags.DEFINE_string("scratch", None, "With --all: directory for models and runs. Unset: a temporary one.")
JOBS = flags.DEFINE_integer("jobs", os.cpu_count() or 1, "With --all: runs at once.", lower_bound=1)
MINUTES = flags.DEFINE_float("minutes", 60.0, "With --all: minutes after which no run is started and those that run are ended.")
JUDGE = flags.DEFINE_string("judge", None, "Directory of kept runs to judge.")
LIVE = flags.DEFINE_string("live", None, "Directory of kept runs, of which the healthy ones are judged as they went on.")
PAGE = flags.DEFINE_string("page", None, "With --judge: file to write the page to.")


def bench() -> None:
    if LIST.value:
        _list()
    elif RUN.value is not None:
        _run_one(RUN.value)
    elif ALL.value:
        _run_all()
    elif JUDGE.value is not None:
        _judge(Path(JUDGE.value))
    elif LIVE.value is not None:
        _judge_live(Path(LIVE.value))
    else:
        raise UserError("--list, --run, --all, --judge or --live: missing (--help says what each does)")


def _list() -> None:
    from rljax.experiments.bench.run_library.recipes import RECIPES

    for recipe in RECIPES.values():
        print(f"{recipe.link or 'healthy':12} {recipe.name:26} {recipe.words}")


def _run_one(name: str) -> None:
    from rljax.experiments.bench.run_library.commands import run_here
    from rljax.experiments.bench.run_library.recipes import find

    recipe = find(name)
    if WORKDIR.value is None:
        raise UserError("--workdir: missing (a directory for the run)")
    run_here(recipe, SEED.value, Path(WORKDIR.value), Path(MODELS.value))


def _run_all() -> None:
    from rljax.experiments.bench.run_library.pool import HALVES, Job, Pool
    from rljax.experiments.bench.run_library.recipes import RECIPES, find

    if OUT.value is None:
        raise UserError("--out: missing (a directory for what is kept)")
    recipes = [find(name) for name in ONLY.value] or list(RECIPES.values())
    jobs = [Job(recipe, seed) for recipe in recipes for seed in HALVES]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(SCRATCH.value or temporary)
        asyncio.run(Pool(Path(OUT.value), scratch, jobs=JOBS.value, minutes=MINUTES.value).make(jobs))


def _judge(directory: Path) -> None:
    from rljax.experiments.bench.run_library import judge

    verdicts = judge.judge_directory(directory)
    page = judge.page(verdicts)
    print(page)
    for half, of_half in verdicts.items():
        for line in judge.wrong(of_half):
            print(f"{half}: {line}")
    if PAGE.value is not None:
        Path(PAGE.value).write_text(page)


def _judge_live(directory: Path) -> None:
    from rljax.experiments.bench.run_library import kept
    from rljax.experiments.bench.run_library.healthy import HEALTHY
    from rljax.experiments.bench.run_library.live import judge_live
    from rljax.experiments.bench.run_library.pool import HALVES

    names = [recipe.name for recipe in HEALTHY]
    for half in HALVES.values():
        for verdicts in judge_live(kept.read(directory / f"{half}{kept.SUFFIX}", names)):
            print(verdicts, flush=True)


if __name__ == "__main__":
    main.run_main(bench)
