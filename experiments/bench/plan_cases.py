"""Learners and samplers on one GPU, each a plan and the command whose peak of memory it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.experiments.bench.packed_rows import PackedRows
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Plan, Request, plan
from rljax.planning.footprint import Footprint

SHARE = 0.4  # mem_fraction_static of a server
LEARNING = (  # moments of a learner's estimate that an update goes through
    "loss",
    "hidden states of whole rows",
    "optimizer step",
    "backward pass",
    "last layer's backward pass",
    "first layer's backward pass",
    "reduction of the embedding's gradient",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is planned for, and measured by a command or a server."""

    shape: str
    what: str
    mode: str  # allocation_mode
    moments: tuple[str, ...]  # of the estimate that the command goes through
    keys: dict[str, Any]  # of the config
    lengths: tuple[int, int] = (512, 512)  # tokens of a prompt and a completion
    command: tuple[str, ...] = ()  # a module of experiments.bench and its flags; none: a server
    rows: PackedRows | None = None  # of a learner

    def plan(self, topology: str) -> Plan:
        """Plans it for a topology such as h200:1."""
        config = io.load("base", [("allocation_mode", self.mode), *((key, str(value)) for key, value in self.keys.items())])
        return plan(Request(config, shape_of(self.shape), Topology.parse(topology), find_plugin, *self.lengths))

    def planned(self, topology: str) -> float:
        """Returns the estimated peak in bytes, over the moments that the command goes through."""
        made = self.plan(topology)
        side = made.sampler if self.rows is None else made.learner
        assert side is not None
        return peak_of(side.footprint, self.moments)


def peak_of(footprint: Footprint, moments: Sequence[str] = LEARNING) -> float:
    """Returns the peak in bytes over those of the moments that the engine has."""
    return footprint.held + max(sum(footprint.moments[m].values()) for m in moments if m in footprint.moments)


def learners(shape: str) -> Iterator[Case]:
    """Yields the learners of a model: both engines, with and without recomputation."""
    rows = PackedRows(8, 2048, 27) if shape == "smollm2-135m" else PackedRows(1, 16384, 16)
    for engine, remat in (("fsdp", "full"), ("fsdp", "none"), ("jax", "none"), ("jax", "full")):
        made = learner(shape, f"{engine}:d1", rows, rows.rows, remat)
        yield dataclasses.replace(made, what=f"{engine} learner, {remat}")


def learner(shape: str, mode: str, rows: PackedRows, rows_per_mb: int, remat: str = "auto") -> Case:
    """Returns the learner of packed rows.

    Args:
      mode: engine and dims, as in allocation_mode.
      rows_per_mb, remat: actor.mb_spec.rows_per_mb, actor.gradient_checkpointing.
    """
    engine, _, dims = mode.partition(":")
    keys = {
        "actor.gradient_checkpointing": remat,
        "actor.mb_spec.rows_per_mb": rows_per_mb,
        "actor.mb_spec.max_tokens_per_row": rows.tokens,
        "gconfig.max_new_tokens": rows.completion,
        "train_dataset.batch_size": rows.rows * rows.segments,
        "gconfig.n_samples": 1,
        "rollout.addr": "host:1",  # the sampler is elsewhere
    }
    flags = [f"--engine={engine}", f"--dims={dims}", f"--gradient_checkpointing={remat}"]
    flags += [f"--rows={rows.rows}", f"--rows_per_mb={rows_per_mb}", f"--tokens={rows.tokens}", f"--segments={rows.segments}"]
    lengths, command = (rows.prompt, rows.completion), ("learner", *flags, "--repeats=2")
    return Case(shape, f"{mode}, {rows.rows} rows", mode, LEARNING, keys, lengths, command, rows)


def samplers(shape: str, *, sglang: bool) -> Iterator[Case]:
    """Yields the samplers of a model, a server of SGLang among them if it is there."""
    keys: dict[str, Any] = {"jax.slots": 128, "jax.context_length": 2048, "jax.prefill_chunk": 2048}
    command = ("decode", "--requests=128", "--slots=128", "--runs=1", "--longest=512")
    yield Case(shape, "jax sampler", "jax:d1", ("decoding", "prefill"), keys, command=command)
    if sglang:
        yield Case(shape, "sglang sampler", "sglang:d1", ("decoding",), {"sglang.mem_fraction_static": SHARE})
