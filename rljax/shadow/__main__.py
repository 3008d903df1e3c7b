"""The shadow's side: `python -m rljax.shadow ENGINE MODEL_DIR DIRECTORY`, started by a run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.engine import Learner
from rljax.engine.plugins import find_plugin
from rljax.shadow.differences import Computed
from rljax.shadow.process import BATCH, CONFIG, LEARNER, LOGP

NICENESS = 10  # the run has the processor first


def main() -> None:
    """Recomputes a batch per line of stdin, until there are no more."""
    engine, model_dir, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.nice(NICENESS)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    config = config_io.from_json((directory / CONFIG).read_text())
    plugin, pool = find_plugin(engine), Pool(engine)
    plugin.prepare()
    learners = {"theirs": plugin.make_learner(config, pool, model_dir)}
    if config.actor.dtype != "float32":
        exact = dataclasses.replace(config, actor=dataclasses.replace(config.actor, dtype="float32"))
        learners["right"] = plugin.make_learner(exact, pool, model_dir)
    for line in sys.stdin:
        job, place = json.loads(line), directory / "job"
        with np.load(place / BATCH, allow_pickle=False) as arrays:
            batch = Batch(**arrays)
        found = {name: compute(learner, place / LEARNER, batch, job["supervised"]) for name, learner in learners.items()}
        logps: dict[str, Any] = {name: each.logp for name, each in found.items()}
        np.savez(place / LOGP, **logps)
        means = {name: {"loss": each.loss, "grad_norm": each.grad_norm} for name, each in found.items()}
        print(json.dumps({"right": None} | means), file=answers, flush=True)


def compute(learner: Learner, checkpoint: Path, batch: Batch, supervised: bool) -> Computed:
    learner.restore(checkpoint)
    logp = learner.score(batch)
    return Computed.of(logp, learner.update_supervised(batch) if supervised else learner.update(batch))


if __name__ == "__main__":
    main()
