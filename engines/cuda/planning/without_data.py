"""The learner's own update on tensors without data: its memory, with no GPU and no weights.

    fake process group -> FakeTensorMode -> TorchLearner(described) -> update -> peak by component

Tensors say that they are on a GPU, so that the code takes its kernels; what those would compute is
not computed. What a function or layer that is compiled makes counts as it would be in memory then.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rljax.backends.torch import logprobs, mesh, model
from rljax.backends.torch.mesh import RankMesh
from rljax.batching.batch import Batch
from rljax.batching.full import full_batch
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.cuda.config import WORKSPACE_BYTES, FsdpConfig
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.engines.cuda.planning.compiled_layers import compiler
from rljax.engines.cuda.planning.tensor_memory import Label, TensorMemory
from rljax.errors import UserError
from rljax.objective.spec import Objective
from rljax.planning.planner import Chosen, every
from rljax.planning.program import Program

MOMENTS = (
    "loss",
    "hidden states of whole rows",
    "last layer's backward pass",
    "first layer's backward pass",
    "reduction of the embedding's gradient",
    "optimizer step",
)
UPDATE = "update"
WORKSPACES = "workspaces of matrix products"  # a phase and a kind
COMMUNICATED = ("aten.empty", "aten.new_empty", "fsdp.", "c10d.", "_c10d")  # beginnings of FSDP2's operators
KINDS = {"mm": "matrix products", "bmm": "matrix products", "addmm": "matrix products", "_varlen_attn": "attention"}


def programs(config: Config, pool: Pool, model_dir: Path, chosen: Chosen = every) -> Iterator[Program]:
    """Runs an update of one full micro-batch per rank, as the rank that takes the most memory.

    Raises UserError for tensor parallelism.
    """
    if not chosen(UPDATE):
        return
    if pool.tensor > 1:
        raise UserError(f"--compile: {pool}: the update of fsdp can't be run without data where t splits the layers (t1)")
    start = time.perf_counter()
    memory = update_memory(config, pool, model_dir)
    yield Program(
        UPDATE,
        how="tensors without data",
        moments=MOMENTS,
        peak=float(memory.peak),
        seconds=time.perf_counter() - start,
        components=components(memory.at_peak),
    )


def update_memory(config: Config, pool: Pool, model_dir: Path, batch: Batch | None = None) -> TensorMemory:
    """Counts the memory of an update, with what cuBLAS takes for itself.

    Args:
      batch: None for one full micro-batch per rank, every token of which is trained on.
    """
    batch, memory = batch or _full_batch(config, pool), TensorMemory()
    with _alone(pool), FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu(memory, config), memory.counting():
        memory.phase = WORKSPACES
        workspaces = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        memory.phase = "between steps"
        learner = TorchLearner(config, pool, model_dir, described=True)
        memory.phase = "update"
        learner.update(batch)
        del workspaces
    return memory


def _full_batch(config: Config, pool: Pool) -> Batch:
    spec = config.actor.mb_spec
    rows = -(-spec.rows_per_mb // pool.context) * pool.context * pool.data * pool.fsdp  # as `micro_batches` fills one up
    return full_batch(rows, spec.max_tokens_per_row, interpolated=Objective.from_config(config).proximal == "interpolated")


def components(sizes: Mapping[Label, int]) -> dict[str, float]:
    """Adds up what was made by kinds of operators, the largest first."""
    found: collections.Counter[str] = collections.Counter()
    for (phase, operator), size in sizes.items():
        found[_kind(phase, operator)] += size
    return {name: float(size) for name, size in found.most_common() if size}


def _kind(phase: str, operator: str) -> str:
    if phase == WORKSPACES:
        return phase
    if phase != "update":
        return "Adam moments" if "zeros_like" in operator else "weights"
    if operator.startswith(COMMUNICATED):
        return "gathered weights and gradients"
    return KINDS.get(operator.split(".")[1] if "." in operator else operator, "other results")


@contextlib.contextmanager
def _alone(pool: Pool) -> Iterator[None]:
    """Makes this process a rank of a pool whose other ranks are not there.

    It is the last one of a context group, whose queries see the most keys; without one rank 0.
    """
    rank = (pool.context - 1) * pool.tensor
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pool.size)
    try:
        RankMesh.of(pool, torch.device("cpu"))  # the mesh is of real numbers
        yield
    finally:
        dist.destroy_process_group()
        mesh.forget()  # or the next plan would get a mesh of groups that are gone


@contextlib.contextmanager
def _as_on_a_gpu(memory: TensorMemory, config: Config) -> Iterator[None]:
    def as_it_is(function: object) -> object:
        return function

    layers = compiler(memory) if FsdpConfig.of(config).compile else as_it_is
    with (
        mock.patch.object(FakeTensor, "is_cuda", property(lambda tensor: True)),
        mock.patch.object(logprobs, "_compiled", memory.fused),
        mock.patch.object(model, "_compiled", layers),
    ):
        yield
