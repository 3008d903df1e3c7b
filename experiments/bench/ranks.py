"""A learner of any number of processes for a benchmark: the others are started, and end with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rljax import engine, multiprocess
from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError


@contextlib.contextmanager
def learner_of(config: Config, pool: Pool, model_dir: Path, scratch: Path) -> Iterator[Learner]:
    """Makes the pool's learner, with all its processes on this host.

    Args:
      scratch: an existing directory, for the logs of the other processes.

    Raises:
      UserError: the engine can't be made, or a launcher has started this process.
      RankFailed: another process is lost.
    """
    engine.prepare(Allocation(None, pool))
    process, count = multiprocess.find_rank(config, pool)
    if process.size > 1:
        raise UserError("a benchmark starts the processes of its learner itself (leave torchrun out)")
    ranks = scratch / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    with multiprocess.Leader(process, count, config, scratch, print) as leader:
        learner = leader.make_learner(config, pool, model_dir)
        try:
            yield learner
        finally:
            learner.close()
