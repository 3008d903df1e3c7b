"""Trains as experiments.train does, with one part of the run exchanged.

    python -m experiments.bench.broken_runs.planted --recipe=never_published \
        --config=configs/bench/broken_runs.py --config.actor.path=runs/models/192/export --workdir=runs/stale
"""

from __future__ import annotations

from unittest import mock

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main, train
from rljax.experiments.bench.broken_runs.recipes import find

RECIPE = flags.DEFINE_string("recipe", None, "Name of the run, as --list of experiments.bench.broken_runs has it.")


def planted() -> None:
    from rljax import loop

    if RECIPE.value is None:
        raise UserError("--recipe: missing (python -m experiments.bench.broken_runs --list)")
    plant = find(RECIPE.value).plant

    class Planted(loop.Loop):
        def __init__(self, run: loop.Run) -> None:
            super().__init__(plant(run) if plant else run)

    with mock.patch.object(loop, "Loop", Planted):
        train.train()


if __name__ == "__main__":
    main.run_main(planted)
