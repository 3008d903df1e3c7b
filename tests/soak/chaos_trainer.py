"""The trainer of the chaos run: a run directory with status.json, and a ledger of what is trained on.

    python -m tests.soak.chaos_trainer WORKDIR SETTINGS

SETTINGS has the keys of `tests.soak.trainer`, and `ledger`: a file that gets a line per step, on
another disk than the run: {"step", "uids", "lag", "pid"}.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from rljax import loop
from rljax.engines.fake.sampler import Trouble
from rljax.engines.http import health
from rljax.engines.http.plugin import attach
from rljax.experiments import main as experiments
from rljax.sinks.run_directory import RunDirectory
from rljax.testing.harness import MemorySink, make_run, read_back
from tests.soak.trainer import Unsteady, overrides_of


class Bookkeeper(Unsteady):
    """A learner that writes down what each step trained on."""

    def update(self, batch):
        means = super().update(batch)
        step = self._adam["policy"].steps
        rows, starts = np.nonzero((batch.segment_ids > 0) & (batch.positions == 0))
        uids = sorted({read_back(batch.token_ids[row, start:]) for row, start in zip(rows, starts, strict=True)})
        line = {"step": step, "uids": uids, "lag": step - 1 - int(batch.versions[batch.loss_mask].min()), "pid": os.getpid()}
        with self.ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return means


class Statuses(MemorySink):
    """Writes status.json as the sink of a run directory does."""

    def __init__(self, first_step, run):
        super().__init__(first_step)
        self._run = run

    def status(self, status):
        self._run.write_status(status)


def main() -> None:
    workdir, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    health.INTERVAL = 0.2
    trouble = Trouble(np.random.default_rng(settings["seed"]), delay=0.004)
    directory = RunDirectory(workdir)
    with experiments.recorded(directory, 1):
        run = make_run(
            workdir,
            overrides_of(settings),
            n_prompts=settings["prompts"],
            trouble=trouble,
            sink=lambda first_step: Statuses(first_step, directory),
            by_workers=True,
        )
        directory.begin(run.config)
        run.engine.learner = Bookkeeper(run.config, workdir / "model")
        run.engine.learner.ledger = Path(settings["ledger"])
        run.engine.sampler, run.engine.in_memory = attach(run.config), None
        loop.train(run)


if __name__ == "__main__":
    main()
