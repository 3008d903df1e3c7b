"""Trains from a program or a notebook: `rljax.train`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rljax.config import io as config_io
from rljax.config import registry
from rljax.config.schema import Config
from rljax.errors import PluginFailed, TooManyFailures, UserError
from rljax.experiments import screen
from rljax.experiments import train as binary
from rljax.process import frames, standard_streams
from rljax.process.signals import Stopped, raise_on_signals, request_stop
from rljax.run.parts import Outcome

log = logging.getLogger("rljax")


def train(
    config: ConfigDict | Config | str,
    *,
    workdir: str | Path,
    reward: Callable[..., Any] | str | None = None,
    workflow: Any = None,
) -> Outcome | None:
    """Trains as `python -m experiments.train` does; the same call with the same workdir goes on.

    It blocks until the run has ended. Inside a running event loop, as notebooks have it, the run
    has a thread of its own. Ctrl-C, or a notebook's interrupt, saves and stops it, and is raised
    then: a script that trains several runs begins no other one. While no logging is set up,
    warnings and what the run says of itself are printed.

    Args:
      config: a config as `get_config()` of a config file returns it, or such a file's name.
      reward: in place of `reward.name`: a function, which may be one of the calling script or of a
        notebook's cell. It runs in the reward processes, to which it is sent with what it refers
        to.
      workflow: in place of `rollout.workflow`: a class, as there, or an object of one.

    Returns:
      How the run ended; None in a process that only followed rank 0.

    Raises:
      UserError: in one line, what is wrong with the config, the data or the reward.
      GuardrailError, TooManyFailures, RankFailed: the run has failed. Where users' code is why, its
        first traceback is printed too, and the error's cause has it.
      KeyboardInterrupt: a signal, perhaps SIGTERM, has stopped it. It was saved, and the same call
        goes on.
    """
    if not isinstance(workdir, str | os.PathLike):
        raise UserError(f"workdir: {workdir!r} is no path (the directory of the run)")
    if not str(workdir):
        raise UserError("workdir: empty (the directory of the run)")
    standard_streams.open_closed()
    resolved = _with(_config_of(config), reward, workflow)
    if not _in_event_loop():
        with screen.shown(), _first_failure_shown(), raise_on_signals():
            outcome = binary.run(resolved, lambda: Path(workdir))
        if outcome is not None and outcome.stopped_by is not None:
            raise Stopped(outcome.stopped_by)
        return outcome
    with screen.shown(), _first_failure_shown(), concurrent.futures.ThreadPoolExecutor(1, "rljax.train") as thread:
        run = thread.submit(binary.run, resolved, lambda: Path(workdir))
        try:
            return run.result()
        except KeyboardInterrupt:
            while not run.done():
                request_stop()  # again, as nobody answers it during the start
                concurrent.futures.wait([run], 0.1)
            run.result()
            raise


@contextlib.contextmanager
def _first_failure_shown() -> Iterator[None]:
    """Shows, as the binary does, where users' code failed that ends the run. Raises it again."""
    try:
        yield
    except (PluginFailed, TooManyFailures) as error:
        if error.__cause__ is not None and (shown := frames.shown(error.__cause__)):
            log.error("the first failure:\n%s", shown)
        raise


def _config_of(config: ConfigDict | Config | str) -> Config:
    if isinstance(config, Config):
        return config
    if isinstance(config, str):
        return config_io.load(config)
    if not isinstance(config, ConfigDict | dict):
        raise UserError(f"config: {config!r} (what get_config() returns, a Config, or the name of a config file)")
    return config_io.from_dict(config)


def _with(config: Config, reward: Callable[..., Any] | str | None, workflow: Any) -> Config:
    """Returns the config with names for a reward and a workflow."""
    if not (reward is None or isinstance(reward, str) or callable(reward)):
        raise UserError(f"reward.name: {reward!r} is no function")
    if not (workflow is None or isinstance(workflow, str) or callable(workflow) or hasattr(workflow, "episode")):
        raise UserError(f"rollout.workflow: {workflow!r} is no class and has no 'async def episode'")
    given = {"reward.name": reward, "rollout.workflow": workflow}
    names = {
        key: value if isinstance(value, str) else registry.provide(value) for key, value in given.items() if value is not None
    }
    for key, name in names.items():
        if config.rollout.workers and registry.is_provided(name):
            raise UserError(f"{key}: {name} is of this program alone, and rollout.workers are others (put it into a module)")
    scoring = dataclasses.replace(config.reward, name=names.get("reward.name", config.reward.name))
    rollout = dataclasses.replace(config.rollout, workflow=names.get("rollout.workflow", config.rollout.workflow))
    return dataclasses.replace(config, reward=scoring, rollout=rollout)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
