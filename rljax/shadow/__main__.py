"""The shadow's side: `python -m rljax.shadow ENGINE MODEL_DIR DIRECTORY`, started by a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from rljax.batching.batch import Batch
from rljax.config import io as config_io
from rljax.config.allocation import Pool
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
    learner = plugin.make_learner(config, pool, model_dir)
    for line in sys.stdin:
        job, place = json.loads(line), directory / "job"
        with np.load(place / BATCH, allow_pickle=False) as arrays:
            batch = Batch(**arrays)
        learner.restore(place / LEARNER)
        logp = learner.score(batch)
        means = learner.update_supervised(batch) if job["supervised"] else learner.update(batch)
        computed = Computed.of(logp, means)
        np.save(place / LOGP, logp)
        print(json.dumps({"loss": computed.loss, "grad_norm": computed.grad_norm}), file=answers, flush=True)


if __name__ == "__main__":
    main()
