"""Writes a Hugging Face directory, or an adapter, from any checkpoint of a run.

    python -m experiments.export --workdir=runs/quickstart --step=best --out=models/best
    python -m experiments.export --workdir=runs/quickstart --step=100 --out=models/step100
    python -m experiments.export --workdir=runs/lora --lora=adapter --out=models/adapter

--step is a number of finished steps, newest (the default), best (by the score of its evaluation,
docs/evaluation.md), or N-failed for the state in which a guardrail ended the run or rolled it back.
The run directory is only read; the run may be live. The checkpoint is read on the host, and needs
neither the devices of the run nor its optimizer's memory. The factors of a LoRA run are merged in
float32; --lora=adapter writes them alone, in float32, as peft reads them, and --lora=both beside
the merged model, in its folder adapter.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.checkpoints.store import Checkpoint
    from rljax.config.schema import Config

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
STEP = flags.DEFINE_string("step", "newest", "Finished steps of the checkpoint; or newest, best, N-failed.")
OUT = flags.DEFINE_string("out", None, "Directory to write; made where it is missing, and refused if it is not empty.")
DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Type of the stored weights; unset: the run's actor.dtype."
)
LORA = flags.DEFINE_enum(
    "lora",
    "merged",
    ["merged", "adapter", "both"],
    "Of a LoRA run: the merged model, its adapter, or both (OUT/adapter).",
)


def run() -> None:
    from rljax.checkpoints import export
    from rljax.diagnosis.run_files import config_of
    from rljax.hf.model_directory import prepare_model_directory
    from rljax.hf.turn_ends import write_turn_ends

    if WORKDIR.value is None:
        raise UserError("--workdir: missing (the directory of a run)")
    if OUT.value is None:
        raise UserError("--out: missing (a directory for the model)")
    if LORA.value == "adapter" and DTYPE.value not in (None, "float32"):
        raise UserError("--dtype: an adapter is written in float32, as it was trained")
    workdir, out = Path(WORKDIR.value), Path(OUT.value)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file (a directory for the model)")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty (remove it, or choose another)")
    config = config_of(workdir)
    checkpoint = export.find(workdir, STEP.value)
    model_dir = prepare_model_directory(config.actor, workdir / "init", seed=config.seed)
    if LORA.value == "adapter":
        export.export_adapter(checkpoint.path, config, model_dir, out)
    elif LORA.value == "both":
        export.export_both(checkpoint.path, config, model_dir, out, dtype=DTYPE.value or config.actor.dtype)
    elif export.is_portable(checkpoint.path):
        export.export_model(checkpoint.path, config, model_dir, out, dtype=DTYPE.value or config.actor.dtype)
    else:
        _by_learner(config, checkpoint, model_dir, out)
    if LORA.value != "adapter":
        write_turn_ends(out, config.gconfig.stop_token_ids)
    score = "" if checkpoint.score is None else f", score {checkpoint.score:.4g}"
    print(f"{out}: step {checkpoint.step}{score}")


def _by_learner(config: Config, checkpoint: Checkpoint, model_dir: Path, out: Path) -> None:
    """Exports through the learner that wrote the checkpoint, if it can't be read otherwise."""
    from rljax import engine
    from rljax.config import allocation
    from rljax.hf.companion_files import copy_tokenizer

    if DTYPE.value is not None:
        raise UserError("--dtype: the engine of this checkpoint exports in the dtype that it has")
    pools = allocation.parse(config.allocation_mode, engine.find_plugin)
    if pools.learner is None:
        raise UserError(f"allocation_mode: {pools} cannot learn, so it can't read {checkpoint.path}")
    engine.prepare(dataclasses.replace(pools, sampler=None))
    learner = engine.make_learner(config, pools.learner, model_dir)
    try:
        learner.restore(checkpoint.path / "learner")
        learner.export(engine.ExportToDirectory(out))
        copy_tokenizer(model_dir, out)
    finally:
        learner.close()


if __name__ == "__main__":
    main.run_main(run)
