"""Memory that the plan estimates for the learner benchmark."""

from __future__ import annotations

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Request, plan

MOMENTS = (
    "loss",
    "optimizer step",
    "backward pass",
    "last layer's backward pass",
    "first layer's backward pass",
    "reduction of the embedding's gradient",
)


def learner_gb(mode: str, shape: str, topology: str, rows: int, tokens: int, segments: int) -> float:
    """Returns the estimated peak of one device over the moments that a step goes through, GB.

    Args:
      topology: CHIP:COUNT, as for experiments.plan.
      segments: trajectories per row; the second half of each is trained on.

    Raises:
      UserError: the mode does not fit the topology, or can't be planned for.
    """
    half = tokens // segments // 2
    keys = {
        "allocation_mode": mode,
        "actor.mb_spec.rows_per_mb": 1,
        "actor.mb_spec.max_tokens_per_row": tokens,
        "gconfig.max_new_tokens": half,
        "train_dataset.batch_size": rows * segments,
        "gconfig.n_samples": 1,
        "rollout.addr": "host:1",  # the sampler is elsewhere
    }
    config = io.load("base", [(key, str(value)) for key, value in keys.items()])
    made = plan(Request(config, shape_of(shape), Topology.parse(topology), find_plugin, half, half))
    assert made.learner is not None
    footprint = made.learner.footprint
    return float(footprint.held + max(sum(footprint.moments[m].values()) for m in MOMENTS if m in footprint.moments)) / 1e9
