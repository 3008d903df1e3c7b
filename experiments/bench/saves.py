"""A checkpoint of a learner: what a step spends on it and waits for, and what the whole takes.

python -m experiments.bench.saves --engine=jax,fsdp    # on a GPU: Qwen3-0.6B's shape, 16384 tokens
python -m experiments.bench.saves --shape=smollm2-135m --tokens=256 --segments=4 --dtype=float32

In one process, in turns: a save before the next step (`Learner.save`), and one beside the next
steps (`Learner.begin_save`), which score their batch and then update, as a run does. Both are whole
as a run's checkpoints are: checksums, synced, renamed (rljax/checkpoints/store.py). A step waits
for `begin_save`, and for its copy where that is not done before the update (timeperf/save_copy).
CPU seconds of a save before the next step are of all threads; those of `begin_save` are of the
thread that calls it, which is the step's. Several engines are measured one after the other, each in
a process of its own. Flags are those of experiments.bench.learner; the shares are those of medians
over --saves. Nothing here has a limit: a save takes as long as the disk needs for 12 bytes per
parameter, and each is said on stderr as it ends, so that a run that is stopped has told what it had
measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from rljax.batching.batch import Batch
from rljax.checkpoints.background import in_thread
from rljax.checkpoints.store import Checkpoints
from rljax.config.allocation import parse
from rljax.engine import Learner, find_plugin
from rljax.experiments import main
from rljax.experiments.bench import learner as steps
from rljax.experiments.bench.shapes import make_model

SAVES = flags.DEFINE_integer("saves", 3, "Saves of each kind.", lower_bound=1)
CHECKPOINTS = flags.DEFINE_string("checkpoints", "", "Directory for the checkpoints; empty: a temporary one.")


def bench() -> None:
    engines = steps.ENGINE.value.split(",")
    if len(engines) == 1:
        measure()
        return
    with tempfile.TemporaryDirectory() as model:
        for engine in engines:  # a later flag counts
            of_engine = [*sys.argv[1:], f"--engine={engine}", f"--directory={steps.DIRECTORY.value or model}"]
            ended = subprocess.run([sys.executable, "-m", "rljax.experiments.bench.saves", *of_engine], check=False)
            if ended.returncode:
                sys.exit(ended.returncode)  # it has said why


def measure() -> None:
    """Measures one engine, and prints a line of JSON."""
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(steps.DIRECTORY.value or f"{temporary}/model")
        spec, config = make_model(model, steps.SHAPE.value), steps.make_config()
        pool = parse(config.allocation_mode, find_plugin).learner
        assert pool is not None
        learner, batch = find_plugin(pool.engine).make_learner(config, pool, model), steps.make_batch(spec.vocab_size)
        store = Checkpoints(Path(CHECKPOINTS.value or f"{temporary}/checkpoints"), keep_last=1)
        alone = [_step(learner, batch)[0] for _ in range(4)][2:]
        found = []
        for i in range(SAVES.value):
            found.append(_one_of_each(learner, batch, store, 2 * i))
            seconds = ", ".join(f"{name} {value:.3g}" for name, value in found[-1].items())
            print(f"{i + 1} of {SAVES.value} saves of each kind: {seconds}", file=sys.stderr, flush=True)
        learner.close()
        newest = next(store.intact()).path
        size = sum(path.stat().st_size for path in newest.rglob("*"))
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    waited = medians["begin_s"] + medians["copy_s"]
    print(
        json.dumps(
            {
                "mode": config.allocation_mode,
                "shape": steps.SHAPE.value,
                "checkpoint_mb": round(size / 1e6),
                **{name: round(seconds, 4) for name, seconds in medians.items()},
                "waited_s": round(waited, 3),
                "begin_cpu_of_foreground": round(medians["begin_cpu_s"] / medians["foreground_cpu_s"], 5),
                "waited_of_foreground": round(waited / medians["foreground_s"], 4),
                "waited_of_background": round(waited / medians["background_s"], 4),
                "step_s": round(statistics.median(alone), 3),
                "device": steps.device_name(pool.engine),
                "cores": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    )


def _one_of_each(learner: Learner, batch: Batch, store: Checkpoints, number: int) -> dict[str, float]:
    """Saves before the next step, then beside the next steps. Returns seconds by their use."""
    began, cpu = time.perf_counter(), time.process_time()
    store.save(number, lambda directory: learner.save(directory / "learner"))
    foreground, foreground_cpu = time.perf_counter() - began, time.process_time() - cpu

    began, cpu, draft = time.perf_counter(), time.thread_time(), store.draft(number + 1)
    draft.begin()
    written = learner.begin_save(draft.path / "learner")
    begin, begin_cpu = time.perf_counter() - began, time.thread_time() - cpu
    whole: list[float] = []

    def finish() -> None:
        written.result()
        draft.finish(None)
        whole.append(time.perf_counter() - began)
        store.purge(store.retire(draft.step))

    finished = in_thread("finish", finish)
    beside: list[float] = []
    copies: list[float] = []
    while not beside or not finished.done():
        seconds, copy = _step(learner, batch)
        beside.append(seconds)
        copies.append(copy)
    finished.result()
    return {
        "foreground_s": foreground,
        "foreground_cpu_s": foreground_cpu,
        "begin_s": begin,
        "begin_cpu_s": begin_cpu,
        "copy_s": sum(copies),
        "background_s": whole[0],
        "step_beside_s": statistics.mean(beside),
    }


def _step(learner: Learner, batch: Batch) -> tuple[float, float]:
    """Scores and updates. Returns the seconds of both, and those of the wait for a copy."""
    began = time.perf_counter()
    learner.score(batch)
    means = learner.update(batch)
    seconds = time.perf_counter() - began
    copy = means["timeperf/save_copy"].value if "timeperf/save_copy" in means else 0.0
    return seconds, copy


if __name__ == "__main__":
    main.run_main(bench)
