"""Hugging Face directories from checkpoints of a run: the whole model, the adapter alone, or both.

No learner is made: the policy is read on the host, through the plugin of the engine that wrote the
checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rljax.checkpoints.integrity import Corrupt, check_whole, read_meta
from rljax.checkpoints.store import Checkpoint, Checkpoints
from rljax.config.schema import Config
from rljax.engine import portable_plugin
from rljax.errors import UserError
from rljax.hf.companion_files import write_companions
from rljax.hf.read_model import read_model
from rljax.hf.weights import WeightReader, write_json, write_tensors
from rljax.hf.whole_model import write_model

NEWEST, BEST = "newest", "best"
ADAPTER_FOLDER = "adapter"  # in a model directory that has both
_FACTORS = ("lora_A.weight", "lora_B.weight")


def find(workdir: Path, which: str) -> Checkpoint:
    """Finds a checkpoint of a run.

    Args:
      which: "newest", "best" (by the score of its evaluation), the number of finished steps, or
        that number and "-failed" for the state in which a run ended or was rolled back.

    Raises:
      UserError: there is no such checkpoint, or it is not intact.
    """
    directory = workdir / "checkpoints"
    checkpoints = Checkpoints(directory, keep_last=1)
    there = [path.name for path in sorted(directory.glob("*-failed"))]
    all_names = ", ".join([*map(str, checkpoints.steps()), *there])
    if not all_names:
        raise UserError(f"--workdir: no checkpoint in {directory} (saver.freq_steps; or the run has not saved yet)")
    if which == NEWEST:
        found = next(checkpoints.intact(), None)
    elif which == BEST:
        found = checkpoints.best()
        if found is None:
            raise UserError(f"--step: no checkpoint in {directory} was evaluated (evaluator.best saves those that are)")
    elif re.fullmatch(r"\d+(-failed)?", which):
        found = _of_name(directory / which) if (directory / which).is_dir() else None
    else:
        raise UserError(f"--step: {which!r} is neither newest, best, a number of steps nor N-failed")
    if found is None:
        raise UserError(f"--step: no intact checkpoint {which} in {directory} (there: {all_names})")
    return found


def _of_name(path: Path) -> Checkpoint:
    try:
        manifest = check_whole(path)
    except (Corrupt, OSError) as error:
        raise UserError(f"--step: {path} is not intact: {error}") from None
    return Checkpoint(path, manifest["step"], manifest["score"])


def is_portable(checkpoint: Path) -> bool:
    """Returns whether an installed engine reads a checkpoint without making a learner."""
    try:
        return portable_plugin(str(read_meta(checkpoint / "learner").get("format"))) is not None
    except UserError:
        return False


def export_model(checkpoint: Path, config: Config, model_dir: Path, out: Path, *, dtype: str) -> None:
    """Writes the policy of a checkpoint as a model directory: weights, config and tokenizer.

    Adapters are merged in float32, and rounded once to the dtype.

    Args:
      checkpoint: the checkpoint's directory.
      config: of the run.
      model_dir: the model that the run began with, whose config and tokenizer are copied.
      out: directory to write, whole or not at all; one that is there is replaced.
      dtype: of the stored weights: "float32", "bfloat16" or "float16".

    Raises:
      UserError: the checkpoint can't be read, or the directory can't be written.
    """
    _whole_or_not(out, _model_writer(checkpoint, _params(checkpoint), config, model_dir, dtype))


def export_adapter(checkpoint: Path, config: Config, model_dir: Path, out: Path) -> None:
    """Writes the adapter of a LoRA checkpoint in float32, as peft reads it.

    Raises:
      UserError: the run has no adapters, the checkpoint can't be read, or the directory can't be
        written.
    """
    _whole_or_not(out, _adapter_writer(checkpoint, _params(checkpoint), config, model_dir))


def export_both(checkpoint: Path, config: Config, model_dir: Path, out: Path, *, dtype: str) -> None:
    """Writes the merged model of a LoRA checkpoint, and its adapter in the folder `adapter` of it.

    Arguments and errors are those of `export_model` and `export_adapter`.
    """
    params = _params(checkpoint)
    write_adapter = _adapter_writer(checkpoint, params, config, model_dir)
    write_merged = _model_writer(checkpoint, params, config, model_dir, dtype)

    def write(directory: Path) -> None:
        write_merged(directory)
        write_adapter(directory / ADAPTER_FOLDER)

    _whole_or_not(out, write)


def _model_writer(
    checkpoint: Path, params: dict[str, np.ndarray], config: Config, model_dir: Path, dtype: str
) -> Callable[[Path], None]:
    """Returns what fills a directory with the whole model."""
    spec, reader = read_model(model_dir), None
    if _has_adapters(params):
        reader = WeightReader(model_dir)
        reader.check(spec)
    scale = config.actor.lora.alpha / max(config.actor.lora.rank, 1)

    def read(name: str) -> np.ndarray:
        if reader is None:
            if name not in params:
                raise UserError(f"checkpoint: {checkpoint} has no tensor {name!r} (is {model_dir} its model?)")
            return params[name]
        whole = reader.read(name).astype(np.float32)
        a, b = (params.get(name.removesuffix("weight") + factor) for factor in _FACTORS)
        if a is None or b is None:
            return whole
        return np.asarray(whole + scale * (b.astype(np.float32) @ a.astype(np.float32)))

    def write(directory: Path) -> None:
        write_companions(directory, spec, dtype, model_dir)
        write_model(directory, spec, read, dtype, model_dir)

    return write


def _adapter_writer(checkpoint: Path, params: dict[str, np.ndarray], config: Config, model_dir: Path) -> Callable[[Path], None]:
    """Returns what fills a directory with the adapter. Raises UserError if there is none."""
    lora = config.actor.lora
    if not _has_adapters(params):
        raise UserError(f"--lora: {checkpoint} has no adapters (actor.lora.rank is 0: leave --lora out for the model)")

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        arrays = {f"base_model.model.{name}": array for name, array in params.items() if name.endswith(_FACTORS)}
        write_tensors(directory / "adapter_model.safetensors", arrays, "float32")
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model_dir),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(lora.target_modules),
            "inference_mode": True,
        }
        write_json(directory / "adapter_config.json", settings)

    return write


def _params(checkpoint: Path) -> dict[str, np.ndarray]:
    """Reads the policy: all weights, or the factors of its adapters, by HF name."""
    directory = checkpoint / "learner"
    form = read_meta(directory).get("format")
    plugin = portable_plugin(str(form))
    if plugin is None:
        raise UserError(f"checkpoint: {directory} has the format {form!r}, which no installed engine reads")
    return dict(plugin.read_checkpoint(directory)["params"])


def _has_adapters(params: dict[str, np.ndarray]) -> bool:
    return any(name.endswith(_FACTORS) for name in params)


def _whole_or_not(out: Path, write: Callable[[Path], None]) -> None:
    """Fills a directory aside and renames it to `out`."""
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        shutil.rmtree(out, ignore_errors=True)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
