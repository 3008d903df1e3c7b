"""One process of the soak: trains on the fake engine with delays and faults, until done or killed.

lag: 0 for delays but no faults. addr: sampling servers to attach to. listen: address for workers,
which then generate.

    python -m tests.soak.trainer WORKDIR SETTINGS
    SETTINGS: '{"epochs": 2, "prompts": 90, "seed": 1, "lag": 2, "addr": "", "listen": ""}'
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from rljax import loop
from rljax.engines.fake.sampler import Trouble
from rljax.engines.http import health
from rljax.engines.http.plugin import attach
from rljax.testing.harness import MemorySink, RememberingLearner, make_run


class Unsteady(RememberingLearner):
    """A learner with steps of random duration, so that publishes come at random times."""

    random = np.random.default_rng()

    def update(self, batch):
        time.sleep(self.random.uniform(0, 0.02))
        return super().update(batch)


class Watching(MemorySink):
    """Records the memory and the open files of the process at each step."""

    def __init__(self, first_step, path):
        super().__init__(first_step, path)
        self.files, self.bytes, self.process = [], [], psutil.Process()

    def write(self, step, metrics):
        super().write(step, metrics)
        self.files.append(self.process.num_fds())
        self.bytes.append(self.process.memory_info().rss)


def overrides_of(settings):
    """Returns the keys of the config that a soak sets."""
    return {
        "rollout.max_head_offpolicyness": settings["lag"],
        "rollout.addr": settings["addr"],
        "rollout.listen": settings["listen"],
        "total_train_epochs": settings["epochs"],
        "gconfig.n_samples": 2,
        "saver.freq_steps": 3,
        "rollout.request_retries": 1,
        "recover.max_prompt_failures": 1000,  # every prompt must be trained on in the end
        "recover.max_consecutive_failures": 1000,
    }


def main() -> None:
    workdir, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    health.INTERVAL = 0.2
    overrides = overrides_of(settings)
    trouble = Trouble(np.random.default_rng(settings["seed"]), delay=0.004, failure_rate=0.1 if settings["lag"] else 0.0)
    sinks = []

    def sink(first_step: int) -> MemorySink:
        sinks.append(Watching(first_step, workdir / "metrics.jsonl"))
        return sinks[-1]

    files = _open_files()
    run = make_run(
        workdir, overrides, n_prompts=settings["prompts"], trouble=trouble, sink=sink, by_workers=bool(settings["listen"])
    )
    run.engine.learner = learner = Unsteady(run.config, workdir / "model")
    if settings["addr"]:
        run.engine.sampler, run.engine.in_memory = attach(run.config), None
    outcome = loop.train(run)
    report = {
        "trained": learner.trained,
        "most_lag": learner.most_lag,
        "step": outcome.step,
        "files_left": _open_files() - files,
        "steps_of_the_last": len(sinks[0].files),
        "files_grown": _grown(sinks[0].files),
        "bytes_grown": _grown(sinks[0].bytes),
    }
    (workdir / "done.json").write_text(json.dumps(report))


def _grown(values):
    """Returns settings much the maximum of the second half exceeds that of the first."""
    half = len(values) // 2
    return max(values[half:]) - max(values[:half]) if half else 0


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    main()
