"""Memory that the plan estimates for the learner benchmark."""

from __future__ import annotations

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.experiments.bench.packed_rows import PackedRows
from rljax.experiments.bench.plan_cases import peak_of
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Request, plan


def learner_gb(mode: str, shape: str, topology: str, rows: int, tokens: int, segments: int) -> float:
    """Returns the estimated peak of one device over the moments that a step goes through, GB.

    Args:
      topology: CHIP:COUNT, as for experiments.plan.
      segments: trajectories per row; the second half of each is trained on.

    Raises:
      UserError: the mode does not fit the topology, or can't be planned for.
    """
    packed = PackedRows(rows, tokens, segments)
    keys = {
        "allocation_mode": mode,
        "actor.mb_spec.rows_per_mb": 1,
        "actor.mb_spec.max_tokens_per_row": tokens,
        "gconfig.max_new_tokens": packed.completion,
        "train_dataset.batch_size": rows * segments,
        "gconfig.n_samples": 1,
        "rollout.addr": "host:1",  # the sampler is elsewhere
    }
    config = io.load("base", [(key, str(value)) for key, value in keys.items()])
    made = plan(Request(config, shape_of(shape), Topology.parse(topology), find_plugin, packed.prompt, packed.completion))
    assert made.learner is not None
    return peak_of(made.learner.footprint) / 1e9
