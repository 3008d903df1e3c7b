"""Memory of a training step, and the choice of gradient checkpointing that follows from it."""

from __future__ import annotations

from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import parameter_count, projections

AUTO = "auto"
STATE_BYTES = 18  # per parameter: float32 master, two moments and gradient, and a half-precision copy
LOGIT_BYTES = 8  # per logit of a chunk: float32, its slope in half precision, and room
SHARE = 0.5  # of the device's memory; the rest is for a sampler and for XLA's temporaries
FEWEST_ROWS, MOST_ROWS = 2048, 8192  # of logits at once; with more, no matrix product gets faster
LOGITS_SHARE = 0.1  # of the device's memory, for the logits of a chunk


def training_bytes(spec: ModelSpec, tokens: int, chunk: int, shards: int) -> float:
    """Returns the most bytes that a device needs for a micro-batch without recomputation.

    Args:
      tokens: tokens of the micro-batch on one device.
      chunk: `actor.logprob_chunk`.
      shards: devices that parameters, gradients and moments are split over.
    """
    outputs = sum(size for size, _, _ in projections(spec).values()) + spec.num_heads * spec.head_dim + spec.hidden_size
    kept = 2 * 2 * outputs * spec.num_layers * tokens  # half precision; as much again for elementwise results
    return kept + STATE_BYTES * parameter_count(spec) / shards + LOGIT_BYTES * spec.vocab_size * min(chunk, tokens)


def logit_rows(choice: int | None, vocabulary: int, memory: int | None = None) -> int:
    """Resolves None of `actor.logprob_chunk`: FEWEST_ROWS, doubled up to MOST_ROWS while the logits
    of so many rows fit LOGITS_SHARE of the device.

    Args:
      choice: the config's value; any other than None is returned unchanged.
      vocabulary: logits per row.
      memory: bytes of the device; None if not known, as on a CPU.
    """
    if choice is not None:
        return choice
    rows = FEWEST_ROWS
    while memory is not None and rows < MOST_ROWS and LOGIT_BYTES * vocabulary * 2 * rows <= LOGITS_SHARE * memory:
        rows *= 2
    return rows


def checkpointing(choice: str, needed: float, memory: int | None) -> str:
    """Resolves "auto" of `actor.gradient_checkpointing`: "none" if the step fits, else "full".

    Args:
      choice: the config's value; any other than "auto" is returned unchanged.
      needed: bytes, from `training_bytes`.
      memory: bytes of the device; None if not known, as on a CPU.
    """
    if choice != AUTO:
        return choice
    return "none" if memory is not None and needed <= SHARE * memory else "full"
