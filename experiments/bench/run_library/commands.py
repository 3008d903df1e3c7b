"""The commands that make a model to start from, and a run of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rljax.errors import UserError
from rljax.experiments.bench.run_library.recipe import MODELS, Recipe, Settings

MODEL_SEED = 1  # one model of each kind: seeds differ in what is drawn during reinforcement


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a run that shares a machine with others."""
    count = str(threads)
    limits = {"OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count, "RAYON_NUM_THREADS": count}
    return {**os.environ, **limits, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


def model_directory(models: Path, name: str) -> Path:
    """Returns the Hugging Face directory of a warmed-up model."""
    return models / name / "export"


def warm_up(models: Path, name: str) -> list[str]:
    """Returns the command of the supervised warm-up of a model of `MODELS`."""
    model = MODELS[name]
    settings: Settings = {
        "seed": MODEL_SEED,
        "total_train_steps": 0,
        "evaluator.freq_steps": None,
        "saver.freq_steps": None,
        "stats_logger.live": False,
        **model.settings,
    }
    return _command("train", model.config, models / name, settings)


def sessions(recipe: Recipe, seed: int, workdir: Path, models: Path) -> list[list[str]]:
    """Returns the commands of a run, one per session, each of which goes on from the one before."""
    paths = {"actor.path": recipe.model, "actor.distill.teacher": recipe.teacher}
    made = {key: str(model_directory(models, name)) for key, name in paths.items() if name is not None}
    both = {"seed": seed, **made, **recipe.settings}
    several = [both] if recipe.then is None else [both, {**both, **recipe.then}]
    binary, planted = ("bench.run_library.planted", [f"--recipe={recipe.name}"]) if recipe.plant else ("train", [])
    return [[*_command(binary, recipe.config, workdir, settings), *planted] for settings in several]


def _command(binary: str, config: str, workdir: Path, settings: Mapping[str, object]) -> list[str]:
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", f"rljax.experiments.{binary}", f"--config={config}", f"--workdir={workdir}", *overrides]


def run_here(recipe: Recipe, seed: int, workdir: Path, models: Path) -> None:
    """Makes one run, and first the models that it starts from if they are missing.

    Raises:
      UserError: a warm-up failed. A run that fails is a result.
    """
    for name in recipe.models:
        if not model_directory(models, name).is_dir():
            done = subprocess.run(warm_up(models, name), env=environment(os.cpu_count() or 1), check=False)
            if done.returncode:
                raise UserError(f"{models}: the warm-up of {name} ended with status {done.returncode}")
    for command in sessions(recipe, seed, workdir, models):
        subprocess.run(command, env=environment(os.cpu_count() or 1), check=False)
