"""The bigram table and its directory.

Sampler and learner read log-probs from one function, so the ratio is 1 exactly.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from rljax.errors import UserError

WEIGHTS = "bigram.safetensors"


def make_model(directory: Path, vocab_size: int) -> None:
    """Writes a model directory whose policy is uniform."""
    write(directory, np.zeros((vocab_size, vocab_size), np.float32))


def write(directory: Path, table: np.ndarray) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"table": table}, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": len(table)}))


def read(directory: Path) -> np.ndarray:
    """Reads the logits, [V, V] float32; a row belongs to a last token.

    The directory of another kind of model gives zeros, with its vocabulary.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"actor.path: no config.json in {directory} (a Hugging Face model directory has one)")
    vocab_size = json.loads(path.read_text())["vocab_size"]
    if not (directory / WEIGHTS).is_file():
        return np.zeros((vocab_size, vocab_size), np.float32)
    return load_file(directory / WEIGHTS)["table"]


def log_probs(table: np.ndarray, temperature: float) -> np.ndarray:
    """Returns log-probabilities of the next token given the last, [V, V] float64, nats."""
    logits = table.astype(np.float64) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
