"""Weights & Biases, by its own client: WANDB_MODE, WANDB_API_KEY and the like are its to read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.metrics.mean import Mean, flatten, merge
from rljax.sinks import Status
from rljax.sinks.run_directory import RunDirectory
from rljax.types import Trajectory


class WandbSink:
    """Scalars under the names of metrics.jsonl.

    WORKDIR/wandb_id keeps the run's id, for a resumed run to go on in it.
    """

    def __init__(self, run: RunDirectory, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("stats_logger.wandb: not installed (pip install 'rljax[wandb]')") from None
        id_file = run.path / "wandb_id"
        if not id_file.exists():
            run.write_text("wandb_id", secrets.token_hex(4))
        self._run: Any = wandb.init(
            project=config.stats_logger.wandb_project,
            name=run.path.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run.path),
            config=config_io.to_dict(config),
        )
        self._step: int | None = None
        self._means: dict[str, Mean] = {}

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """W&B merges the calls of one step by overwriting: each gets the merged values."""
        self._means = merge([self._means, metrics]) if step == self._step else dict(metrics)
        self._step = step
        self._run.log(flatten(self._means), step=step)

    def sample(self, step: int, uid: str, trajectory: Trajectory) -> None:
        """Samples are in samples.jsonl."""

    def status(self, status: Status) -> None:
        self._run.summary.update({"state": str(status.state), "version": status.version})

    def close(self) -> None:
        self._run.finish()
