"""Which of a learner's processes this one is: the engine says it, a launcher's environment does, or it is alone."""

from __future__ import annotations

from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import find_plugin
from rljax.engine.rank import ProcessRank, from_environment
from rljax.errors import UserError


def find_rank(config: Config, pool: Pool | None) -> tuple[ProcessRank, int]:
    """Where this process stands among those of a pool's learner, and how many the learner takes.

    A rank of size 1 beside a larger number: no launcher started the others, so the leader does (`Leader`).

    Raises:
      UserError: a launcher started another number of processes than the pool takes.
    """
    if pool is None:
        return ProcessRank(), 1
    plugin = find_plugin(pool.engine)
    process = plugin.process(config, pool) or from_environment()
    count = plugin.processes(config, pool)
    if count is None:
        return process, process.size
    if process.size > 1 and process.size != count:
        raise UserError(
            f"allocation_mode: {pool} learns in {count} process{'es' if count > 1 else ''}, but WORLD_SIZE={process.size} were"
            f" started (torchrun --nproc-per-node times --nnodes must be {count})"
        )
    return process, count
