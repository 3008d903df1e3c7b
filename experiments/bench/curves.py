"""A metric over steps as a picture, a line per run.

python -m experiments.bench.curves --out=docs/quickstart.png runs/seed1 runs/seed2 runs/seed3
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from rljax import json_lines
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
    if missing := [run for run in runs if not json_lines.parts(run / "metrics.jsonl")]:
        raise UserError(f"{missing[0]}: no metrics.jsonl (the directory of a run)")
    if not runs:
        raise UserError("no run is named (their directories, as in runs/seed1 runs/seed2)")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for run in runs:
        label = run.name if LABEL.value == "name" else f"seed {json.loads((run / 'config.json').read_text())['seed']}"
        axes.plot(*zip(*points(run, METRIC.value), strict=True), marker=".", label=label)
    axes.set(xlabel="step", ylabel=METRIC.value, title=TITLE.value)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(OUT.value, dpi=110)


def points(run: Path, metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each step that has the metric. Raises UserError if none has."""
    found = [(entry["step"], entry[metric]) for entry in json_lines.entries(run / "metrics.jsonl") if metric in entry]
    if not found:
        raise UserError(f"{run}: no {metric} in metrics.jsonl (--metric names another)")
    return found


if __name__ == "__main__":
    main.run_main(bench, takes_arguments=True)
