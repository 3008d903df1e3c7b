"""Weights & Biases, through its own client, which reads WANDB_MODE, WANDB_API_KEY and the like."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from rljax import json_lines
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean, flatten, merge
from rljax.sinks import PartialSink, Status
from rljax.sinks.run_directory import RunDirectory

ID = "wandb_id"  # file of a run directory: the id of its W&B run


def forget_lost_steps(run: RunDirectory, newest: int | None, first_step: int) -> None:
    """Has the next `WandbSink` begin a W&B run of its own if steps were lost with a killed process.

    Call it before the lines of those steps are cut from metrics.jsonl.

    Args:
      newest: step of the last line of metrics.jsonl; None without any.
      first_step: finished steps that the run goes on from.
    """
    if newest is not None and newest > first_step:
        (run.path / ID).unlink(missing_ok=True)


class WandbSink(PartialSink):
    """Sink that writes scalars and histograms to W&B, under the names of metrics.jsonl.

    WORKDIR/wandb_id has the id of the W&B run, which a resumed run continues. W&B can't take back
    steps that a killed process logged after its last checkpoint. A run that lost some goes on in
    another W&B run of the same group, which is told all of metrics.jsonl first.
    """

    def __init__(self, run: RunDirectory, config: Config) -> None:
        import wandb

        self._histogram = wandb.Histogram
        id_file = run.path / ID
        is_new = not id_file.exists()
        if is_new:
            run.write_text(ID, secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=config.stats_logger.wandb_project,
            group=run.path.name,
            name=run.path.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run.path),
            config=config_io.to_dict(config),
        )
        self._step: int | None = None
        self._means: dict[str, Mean] = {}
        if is_new:
            self._tell_past(run)

    def _tell_past(self, run: RunDirectory) -> None:
        """Logs the lines that metrics.jsonl has already."""
        for line in json_lines.lines(run.path / "metrics.jsonl"):
            entry = json_lines.entry_of(line)
            if entry is not None:  # else a damaged line, which the run directory's sink tells of
                self._run.log({name: value for name, value in entry.items() if name != "step"}, step=entry["step"])

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Logs a step's metrics, merged, since W&B overwrites values of the same step."""
        self._means = merge([self._means, metrics]) if step == self._step else dict(metrics)
        self._step = step
        self._run.log(flatten(self._means), step=step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        pairs = {name: (histogram.counts, histogram.edges) for name, histogram in histograms.items()}
        self._run.log({f"{name}/histogram": self._histogram(np_histogram=pair) for name, pair in pairs.items()}, step=step)

    def status(self, status: Status) -> None:
        self._run.summary.update({"state": str(status.state), "version": status.version, "verdict": status.verdict})

    def close(self) -> None:
        self._run.finish()
