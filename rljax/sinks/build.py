"""Builds the sinks that a config asks for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from rljax.config.schema import Config, StatsLoggerConfig
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.json_lines import newest_step
from rljax.sinks import Sink, Sinks
from rljax.sinks.live import LineSink, LiveSink, can_be_live
from rljax.sinks.planned import PlanSink
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink

PACKAGES = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb"}  # module of each extra


def require_packages(logger: StatsLoggerConfig) -> None:
    """Checks that the package of each sink that is on can be imported.

    Raises UserError that names all that can't.
    """
    missing = [name for name, module in PACKAGES.items() if getattr(logger, name) and not _is_there(module)]
    if missing:
        also = f", nor is {missing[1]}" if missing[1:] else ""
        raise UserError(f"stats_logger.{missing[0]}: not installed{also} (pip install 'rljax[{','.join(missing)}]>=0.1')")


def _is_there(module: str) -> bool:
    """Returns whether a module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def build(
    config: Config,
    run: RunDirectory,
    tokenizer: Tokenizer,
    *,
    first_step: int,
    estimate: Mapping[str, Any] | None = None,
) -> Sinks:
    """Opens the sinks of a run.

    Args:
      first_step: finished steps. A resumed run goes on after them, and lines of later steps are
        cut from its files.
      estimate: the run's plan, for plan.json; None if its engines can't be planned for.

    Raises:
      UserError: a sink's package is not installed, or a file can't be written.
    """
    logger = config.stats_logger
    require_packages(logger)
    if logger.wandb:
        from rljax.sinks.wandb import forget_lost_steps

        forget_lost_steps(run, newest_step(run.path / "metrics.jsonl"), first_step)
    sinks: list[Sink] = [RunDirectorySink(run, tokenizer, first_step=first_step, logger=logger)]
    if estimate is not None:
        sinks.append(PlanSink(run, estimate))
    if logger.tensorboard:
        from rljax.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(run.path / "tensorboard", first_step=first_step))
    if logger.wandb:
        from rljax.sinks.wandb import WandbSink

        sinks.append(WandbSink(run, config))
    sinks.append(LiveSink() if logger.live and can_be_live(sys.stdout) else LineSink(every=logger.line_every))
    return Sinks(sinks)
