"""The JAX learner: one policy (and a critic where the algorithm has one) over a mesh of data, fsdp
and tensor axes.

    batch -> micro-batches on the mesh -> gradients summed -> one optimizer step -> metrics

Master weights and moments are float32, computed with in `actor.dtype`; log-probs only of the
tokens that are trained on. With LoRA the base is frozen and the adapters are what is trained,
optimized and saved. The reference policy and the critic are taken from the policy as it is when RL
begins: at once, or after the supervised warm-up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.backends.jax import checkpoint, hf, multihost
from rljax.backends.jax.accumulate import Loss
from rljax.backends.jax.mesh import dispatching, pool_mesh
from rljax.backends.jax.profile import StepTrace
from rljax.batching.batch import Batch
from rljax.checkpoints.background import WAIT_SHARE, BackgroundWrite
from rljax.config.allocation import Pool
from rljax.config.schema import Config, OptimizerConfig
from rljax.engine import ExportTarget, ExportToSampler, PortableState, WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.common.learner import PhasedLearner, Result, Scorer
from rljax.engines.common.phases import Phases, Tree
from rljax.engines.jax import FORMAT
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.learning import state
from rljax.engines.jax.learning.critic import Critic
from rljax.engines.jax.learning.functions import Functions
from rljax.engines.jax.learning.phase import Phase
from rljax.engines.jax.learning.policy import Policy
from rljax.engines.jax.learning.teacher import Teacher
from rljax.engines.jax.rows import MicroBatches, Rows, micro_batches, one_a_row
from rljax.engines.jax.scoring import scorer_of
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.metrics.guardrails import UpdateBound, update_bounds
from rljax.metrics.mean import Mean
from rljax.objective.spec import PREFIX, ROUNDED_AWAY

log = logging.getLogger(__name__)


class JaxLearner(PhasedLearner[Phase, Critic]):
    """Implements `rljax.engine.Learner`.

    Example:

        learner = JaxLearner(config, Pool("jax", fsdp=2, tensor=2), Path("models/SmolLM2"))
        metrics = learner.update(batch.replace(proximal_logp=learner.score(batch)))
    """

    format = FORMAT

    def __init__(self, config: Config, pool: Pool, model_dir: Path) -> None:
        """Raises UserError for a model or a setting it can't do, or too few devices."""
        self._spec = ModelSpec.from_directory(model_dir)
        super().__init__(config, model_dir, self._spec)
        self._mesh = pool_mesh(pool)
        if JaxConfig.of(config).bitwise and jax.process_count() > 1:
            raise UserError("jax.bitwise: the sampler is of one process, so the learner must be too (see docs/processes.md)")
        self._policy = Policy(config, self._mesh, self._model_dir)
        self._functions = Functions(config, self._policy)
        self._score = self._policy.program(self._functions.logp)
        self._trace = StepTrace(JaxConfig.of(config).profile)
        self._start()

    # Scoring

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the tokens under the current policy.

        [R, T] float32, nats; 0 where loss_mask is False.
        """
        if JaxConfig.of(self._config).bitwise:
            return self._score_bitwise(batch)
        return self._score_with(self._policy.trained, batch)

    def _score_with(self, weights: Tree, batch: Batch) -> np.ndarray:
        return self._forward(batch, functools.partial(self._score, weights, self._policy.frozen))

    def values(self, batch: Batch) -> np.ndarray:
        """Critic's value before each token is drawn.

        [R, T] float32, reward units. Only with adv_estimator "gae".
        """
        critic = self._critic()
        return self._forward(batch, functools.partial(critic.values, critic.trained, self._policy.frozen))

    def _forward(self, batch: Batch, program: Callable[[Rows], jax.Array]) -> np.ndarray:
        """Runs the micro-batches one after the other and reads them all at once."""
        cut = self._cut(batch, batch.loss_mask)
        with jax.set_mesh(self._mesh):
            outputs = [self._dispatched(program, part) for part in cut.parts]
        return cut.scatter(jax.device_get(outputs))

    def _cut(self, batch: Batch, keep: np.ndarray, anchor: np.ndarray | None = None) -> MicroBatches:
        rows = self._config.actor.mb_spec.rows_per_mb
        return micro_batches(batch, keep, self._mesh, rows, self._policy.attention, anchor=anchor)

    def _dispatched(self, program: Callable[[Rows], jax.Array], part: Rows) -> jax.Array:
        with dispatching(self._mesh):
            return program(part)

    def _score_bitwise(self, batch: Batch) -> np.ndarray:
        alone, parts = one_a_row(batch)
        scorer = scorer_of(self._config, self._spec, self._mesh)
        out = np.zeros(batch.shape, np.float32)
        for (row, start, stop), logp in zip(parts, scorer(self._policy.merged(), alone), strict=True):
            out[row, start:stop] = logp
        return np.where(batch.loss_mask, out, np.float32(0))

    # Learning

    def _critic_step(self, critic: Critic, batch: Batch) -> dict[str, Mean]:
        cut = self._cut(batch, batch.loss_mask)
        with jax.set_mesh(self._mesh):
            return critic.update(cut.parts)

    def _policy_step(self, phase: Phase, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        anchor = self._score_bitwise(batch) if JaxConfig.of(self._config).bitwise and not self._sft else None
        with self._trace.step():
            return self._step(phase, batch, keep, anchor)

    def _devices(self) -> tuple[str, int]:
        return self._mesh.local_devices[0].device_kind, self._mesh.size

    def _memory_in_use(self) -> int | None:
        stats = [device.memory_stats() or {} for device in self._mesh.local_devices]
        return sum(s["bytes_in_use"] for s in stats) if all("bytes_in_use" in s for s in stats) else None

    def _memory_peak(self) -> int | None:
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self._mesh.local_devices]
        return max((peak for peak in peaks if peak is not None), default=None)

    def _supervised_step(self, phase: Phase, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        return self._step(phase, batch, keep, None)

    def _step(self, phase: Phase, batch: Batch, keep: np.ndarray, anchor: np.ndarray | None) -> dict[str, Mean]:
        cut = self._cut(batch, keep, anchor)
        compiled, began = phase.compilations(), time.perf_counter()
        with jax.set_mesh(self._mesh):
            before = self._policy.adapters()
            self._policy.trained, means = phase.step(self._policy.trained, self._policy.frozen, cut.parts)
            means = means if before is None else means | {ROUNDED_AWAY: self._policy.rounded_away(before)}
        if phase.compilations() > compiled:
            _tell_of_compilation(cut, time.perf_counter() - began)
        return means

    # Phases

    def _make_actor(self, total_steps: int | None) -> Phase:
        bounds = update_bounds(self._config.guard, "skip")
        return self._phase(self._functions.policy_loss, self._config.actor.optimizer, total_steps, "actor.optimizer", bounds)

    def _make_warmup(self, total_steps: int | None) -> Phase:
        return self._phase(self._functions.supervised_loss, self._config.warmup.optimizer, total_steps, "warmup.optimizer")

    def _phase(
        self, loss: Loss, optimizer: OptimizerConfig, total_steps: int | None, key: str, bounds: Sequence[UpdateBound] = ()
    ) -> Phase:
        with jax.set_mesh(self._mesh):
            return Phase(
                loss, optimizer, total_steps, key, PREFIX, self._policy.trained, self._mesh, bounds, self._policy.rounding
            )

    def _make_critic(self, total_steps: int | None) -> Critic:
        with jax.set_mesh(self._mesh):
            return Critic(self._config, self._policy, total_steps)

    def _load_teacher(self, directory: Path) -> Scorer:
        teacher = Teacher(self._config, directory, self._mesh, self._policy.attention)
        return lambda batch: self._forward(batch, teacher.score)

    def _copy_policy(self) -> Tree:
        with jax.set_mesh(self._mesh):
            return self._policy.copied(self._policy.dtype)

    # Weights and checkpoints

    def export(self, target: ExportTarget) -> WeightSource:
        """Weights for a sampler: in memory, or HF safetensors, config and tokenizer in a
        directory.

        In memory they are copies in `jax.sampler_dtype` that later updates leave alone; adapters
        are merged in both forms.
        """
        if isinstance(target, ExportToSampler):
            with jax.set_mesh(self._mesh):
                return WeightsInMemory(self._policy.published())
        with jax.set_mesh(self._mesh):
            params = self._policy.merged()
        hf.save(
            params,
            self._spec,
            target.directory,
            dtype="float32" if JaxConfig.of(self._config).bitwise else self._config.actor.dtype,
            source=self._model_dir,
        )
        return WeightsInDirectory(target.directory)

    def _weights(self) -> Tree:
        return self._policy.trained

    def _set_weights(self, weights: Tree) -> None:
        self._policy.trained = weights

    def _write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> None:
        checkpoint.save_tree(directory, tree, meta)

    def _begin_write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> BackgroundWrite:
        return checkpoint.begin_save(directory, tree, meta, timeout=WAIT_SHARE * self._config.recover.hang_timeout)

    def _read(self, directory: Path, like: Tree) -> Tree:
        return checkpoint.restore_tree(directory, like)

    def _to_named(self, tree: Tree) -> dict[str, dict[str, np.ndarray]]:
        return state.to_named(tree, self._table())

    def _from_named(self, named: PortableState, tree: Tree, updates: int) -> Tree:
        return state.from_named(named, tree, self._table(), updates)

    def _table(self) -> state.Table:
        return state.table_of(self._spec, self._identity()["lora"])

    def _together(self, what: str, action: Callable[[], Result]) -> Result:
        result = multihost.together(action)
        assert result is not None  # it is run in every process
        return result

    def compilations(self) -> int:
        """Programs compiled for updates and scoring so far."""
        steps = [self._phases.supervised, self._phases.rl and self._phases.rl.actor]
        return self._score._cache_size() + sum(phase.compilations() for phase in steps if phase)

    def close(self) -> None:
        """Lets go of everything on the devices, and of the other processes."""
        self._await_copy()
        self._phases, self._teacher = Phases(), None
        self._policy.trained = self._policy.frozen = {}
        multihost.leave()


def _tell_of_compilation(cut: MicroBatches, seconds: float) -> None:
    """Says why a step took long: its rows have a size that no step had before."""
    rows, tokens = cut.parts[0].token_ids.shape
    trained = cut.parts[0].labels.shape[1]
    log.info(
        "update: compiled for %d x %d rows of %d tokens, at most %d trained in a row: %.1f s with the step "
        "(every eighth of a row's length that the fullest row reaches has a program of its own)",
        *(len(cut.parts), rows, tokens, trained, seconds),
    )
