"""Trains as experiments.train does, with one part of the run exchanged.

    python -m experiments.bench.run_library.planted --recipe=never_published --workdir=runs/stale \
        --config=configs/bench/broken_runs.py --config.actor.path=runs/models/192/export
"""

from __future__ import annotations

from unittest import mock

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main, train
from rljax.experiments.bench.run_library.recipes import find

RECIPE = flags.DEFINE_string("recipe", None, "Name of the run, as --list of experiments.bench.broken_runs has it.")


def planted() -> None:
    from rljax import loop
    from rljax.experiments.bench.run_library import plants

    if RECIPE.value is None:
        raise UserError("--recipe: missing (python -m experiments.bench.broken_runs --list)")
    name = find(RECIPE.value).plant
    if name is None:
        raise UserError(
            f"--recipe: nothing is planted in {RECIPE.value}: its settings are all that differs (experiments.train)"
        )
    plant = plants.PLANTS[name]

    class Planted(loop.Loop):
        def __init__(self, run: loop.Run) -> None:
            super().__init__(plant(run))

    with mock.patch.object(loop, "Loop", Planted):
        train.train()


if __name__ == "__main__":
    main.run_main(planted)
