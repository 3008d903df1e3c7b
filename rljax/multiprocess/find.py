"""Finds this process's rank in a learner: from the engine, or from a launcher's environment."""

from __future__ import annotations

from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import find_plugin
from rljax.engine.rank import ProcessRank, from_environment
from rljax.errors import UserError


def find_rank(config: Config, pool: Pool | None) -> tuple[ProcessRank, int]:
    """Returns this process's rank in a pool's learner, and the number of processes of the learner.

    If the rank's size is 1 and the learner has more processes, no launcher started the others, and
    `Leader` starts them.

    Raises:
      UserError: a launcher started another number of processes than the learner needs.
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
