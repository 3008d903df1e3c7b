"""Estimate of a run on the devices that it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.chips import Topology
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.planning.estimate import Find, Request, plan
from rljax.planning.text import plan_json


def estimate_of(config: Config, model_dir: Path, names: Sequence[str], devices: int, find: Find) -> dict[str, Any] | None:
    """Returns the plan of a run as plain values; None if its parts can't be planned for.

    Args:
      names: of the devices, as the engines know them.
      devices: number of devices that the run takes.
    """
    try:
        teacher = ModelSpec.from_directory(config.actor.distill.teacher) if config.actor.distill.teacher else None
        spec, topology = ModelSpec.from_directory(model_dir), Topology.attached(names, devices)
        return plan_json(plan(Request(config, spec, topology, find, teacher=teacher)))
    except UserError:
        return None
