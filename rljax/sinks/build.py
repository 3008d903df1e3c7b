"""The sinks that a config asks for."""

from __future__ import annotations

import sys

from rljax.config.schema import Config
from rljax.hf.tokenizer import Tokenizer
from rljax.sinks import Sink, Sinks
from rljax.sinks.live import LineSink, LiveSink
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink


def build(config: Config, run: RunDirectory, tokenizer: Tokenizer, *, first_step: int) -> Sinks:
    """Opens them all.

    Args:
      first_step: training steps that are finished: a resumed run goes on after it, and what a file
        says of later ones is cut.

    Raises:
      UserError: when an optional one is asked for and not installed.
    """
    logger = config.stats_logger
    sinks: list[Sink] = [RunDirectorySink(run, tokenizer, first_step=first_step, samples_per_step=logger.samples_per_step)]
    if logger.tensorboard:
        from rljax.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(run.path / "tensorboard", first_step=first_step))
    if logger.wandb:
        from rljax.sinks.wandb import WandbSink

        sinks.append(WandbSink(run, config))
    sinks.append(LiveSink() if logger.live and sys.stdout.isatty() else LineSink())
    return Sinks(sinks)
