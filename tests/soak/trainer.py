"""One process of the soak: trains on the fake engine with delays and faults until it is done, or killed.

python -m tests.soak.trainer WORKDIR EPOCHS PROMPTS SEED LAG      (lag 0: delays, and no faults)
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from rljax import loop
from rljax.engines.fake.sampler import Trouble
from rljax.engines.fake.trial import MemorySink, make_run


def main() -> None:
    workdir, (epochs, prompts, seed, lag) = Path(sys.argv[1]), map(int, sys.argv[2:])
    overrides = {
        "rollout.max_head_offpolicyness": lag,
        "total_train_epochs": epochs,
        "gconfig.n_samples": 2,
        "saver.freq_steps": 3,
        "rollout.request_retries": 1,
        "recover.max_prompt_failures": 1000,  # every prompt must be trained on in the end
        "recover.max_consecutive_failures": 1000,
    }
    trouble = Trouble(np.random.default_rng(seed), delay=0.004, failure_rate=0.1 if lag else 0.0)

    def sink(first_step: int) -> MemorySink:
        return MemorySink(first_step, workdir / "metrics.jsonl")

    files = _open_files()
    run = make_run(workdir, overrides, n_prompts=prompts, trouble=trouble, sink=sink)
    outcome = loop.train(run)
    learner = run.engine.learner
    report = {
        "trained": learner.trained,
        "most_lag": learner.most_lag,
        "step": outcome.step,
        "files_left": _open_files() - files,
    }
    (workdir / "done.json").write_text(json.dumps(report))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
