"""A metric over steps as a picture, a line per run.

python -m experiments.bench.curves --out=docs/quickstart.png runs/seed1 runs/seed2 runs/seed3
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

METRIC = flags.DEFINE_string("metric", "eval-rollout/reward/avg", "A key of metrics.jsonl.")
OUT = flags.DEFINE_string("out", "curves.png", "File for the picture.")
LABEL = flags.DEFINE_enum("label", "seed", ["seed", "name"], "Label of a run: its seed, or the name of its directory.")
TITLE = flags.DEFINE_string("title", "", "Title of the picture.")


def bench() -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("matplotlib: not installed (pip install matplotlib)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [Path(directory) for directory in main.arguments_from_flags()]
    if missing := [run for run in runs if not (run / "metrics.jsonl").is_file()]:
        raise UserError(f"{missing[0]}: no metrics.jsonl (the directory of a run)")
    if not runs:
        raise UserError("no run is named (their directories, as in runs/seed1 runs/seed2)")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for run in runs:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        label = run.name if LABEL.value == "name" else f"seed {json.loads((run / 'config.json').read_text())['seed']}"
        points = [(r["step"], r[METRIC.value]) for r in records if METRIC.value in r]
        if not points:
            raise UserError(f"{run}: no {METRIC.value} in metrics.jsonl (--metric names another)")
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set(xlabel="step", ylabel=METRIC.value, title=TITLE.value)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(OUT.value, dpi=110)


if __name__ == "__main__":
    main.run_main(bench, takes_arguments=True)
