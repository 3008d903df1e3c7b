"""Requirements of a run that hold before anything is loaded, checked by `train` and by `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljax.config.schema import Config
from rljax.hf import adapter, teacher
from rljax.sinks import build as sinks
from rljax.workers.connection import host_and_port


def listening_address(config: Config) -> None:
    """Checks that `rollout.listen` is an address. Raises UserError."""
    if config.rollout.listen:
        host_and_port(config.rollout.listen, "rollout.listen")


def packages_of_sinks(config: Config) -> None:
    """Checks that the packages of all sinks are installed. Raises UserError."""
    sinks.require_packages(config.stats_logger)


def teacher_of_policy(config: Config, model_dir: Path) -> None:
    """Checks that the teacher is a whole model with the policy's tokens. Raises UserError."""
    teacher.check(config.actor, model_dir)


def adapter_of_policy(config: Config, model_dir: Path) -> None:
    """Checks that the adapter to begin with is one of this model and rank. Raises UserError."""
    adapter.check(config.actor, model_dir)


OF_CONFIG: tuple[Callable[[Config], None], ...] = (listening_address, packages_of_sinks)
OF_MODEL: tuple[Callable[[Config, Path], None], ...] = (teacher_of_policy, adapter_of_policy)
