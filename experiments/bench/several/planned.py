"""Memory that the plan estimates for the learner benchmark."""

from __future__ import annotations

from rljax.experiments.bench.packed_rows import PackedRows
from rljax.experiments.bench.plan_cases import learner


def learner_gb(mode: str, shape: str, topology: str, rows: int, tokens: int, segments: int) -> float:
    """Returns the estimated peak of one device over the moments that a step goes through, GB.

    Args:
      topology: CHIP:COUNT, as for experiments.plan.
      segments: trajectories per row; the second half of each is trained on.

    Raises:
      UserError: the mode does not fit the topology, or can't be planned for.
    """
    return learner(shape, mode, PackedRows(rows, tokens, segments), rows_per_mb=1).planned(topology) / 1e9
