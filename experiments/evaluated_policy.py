"""Finds the policy to evaluate: a checkpoint or an export of a run, a model, or a server."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.errors import UserError

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.evaluation.results import Policy

EXPORT = "export"  # of --step: the model that the run exported at its end


@dataclasses.dataclass(frozen=True)
class Found:
    """A policy and the directory of its weights and tokenizer."""

    policy: Policy
    model_dir: Path


def find(config: Config, *, workdir: Path | None, step: str, model: str | None, scratch: Path) -> Found:
    """Finds the policy.

    Args:
      workdir: directory of a run, whose checkpoint is evaluated unless the others say otherwise.
      step: the checkpoint: newest, best, a number of steps, N-failed; or "export".
      model: a model directory, evaluated in place of a checkpoint; the tokenizer of a server.
      scratch: a directory for weights that are written only to be evaluated.

    Raises UserError if there is none.
    """
    from rljax.evaluation.results import Policy
    from rljax.sinks.context import model_digest

    if config.rollout.addr:
        return Found(Policy("server", config.rollout.addr), _tokenizer_of(config, workdir, model, scratch))
    if model is not None:
        return Found(Policy("model", model, digest=model_digest(_model(Path(model)))), Path(model))
    if workdir is None:
        directory = _initial(config, scratch / "init")
        return Found(Policy("model", str(directory), digest=model_digest(directory)), directory)
    if step == EXPORT or (step == "newest" and not any((workdir / "checkpoints").glob("[0-9]*"))):
        directory = _model(workdir / EXPORT)
        return Found(Policy(EXPORT, str(directory), digest=model_digest(directory)), directory)
    from rljax.checkpoints import export

    checkpoint = export.find(workdir, step)
    directory = scratch / "model"
    _export(workdir, checkpoint.path.name, directory)
    policy = Policy("checkpoint", str(checkpoint.path), step=checkpoint.step, digest=model_digest(directory))
    return Found(policy, directory)


def _export(workdir: Path, step: str, out: Path) -> None:
    """Exports a checkpoint in a process of its own.

    It keeps to the CPU, and leaves the accelerators to this process's sampler.

    Raises UserError with the last line of that process if it fails.
    """
    command = [sys.executable, "-m", "rljax.experiments.export", f"--workdir={workdir}", f"--step={step}", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the export of {workdir} ended with status {done.returncode}"]
        raise UserError(lines[-1].removeprefix("error: "))


def _tokenizer_of(config: Config, workdir: Path | None, model: str | None, scratch: Path) -> Path:
    """Returns the directory of the tokenizer for a server's policy."""
    if model is not None:
        return _model(Path(model))
    if workdir is not None and (workdir / "init").is_dir():
        return workdir / "init"
    return _initial(config, scratch / "init")


def _initial(config: Config, init: Path) -> Path:
    from rljax.hf.model_directory import prepare_model_directory

    return prepare_model_directory(config.actor, init, seed=config.seed)


def _model(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise UserError(f"--model: no config.json in {directory} (a Hugging Face model directory, or WORKDIR/export of a run)")
    return directory
