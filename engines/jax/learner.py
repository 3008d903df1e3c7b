"""The JAX learner: one policy (and a critic where the algorithm has one) over a mesh of data, fsdp and tensor axes.

    batch -> micro-batches on the mesh -> gradients summed -> one optimizer step -> metrics, in one transfer

Master weights and moments are float32, computed with in `actor.dtype`; log-probs only of the tokens that are trained on.
With LoRA the base is frozen and the adapters are what is trained, optimised and saved. The reference policy and the critic
are taken from the policy as it is when RL begins: at once, or after the supervised warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rljax.allocation import Pool
from rljax.backends.jax import checkpoint, hf
from rljax.backends.jax.accumulate import Metrics
from rljax.backends.jax.forward import named_logprobs
from rljax.backends.jax.mesh import pool_mesh
from rljax.backends.jax.objective import policy_objective, supervised_objective
from rljax.backends.jax.sharding import replicated
from rljax.batch import Batch
from rljax.compaction import kept
from rljax.config import Config
from rljax.engine import WeightSource
from rljax.engines.jax.critic import Critic
from rljax.engines.jax.phase import Phase
from rljax.engines.jax.rows import Rows, micro_batches, one_a_row
from rljax.engines.jax.scoring import scorer_of
from rljax.errors import UserError
from rljax.metrics import Mean
from rljax.objective import PREFIX, Objective

Tree = Any  # a pytree of arrays
FORMAT = "rljax.jax/1"  # of checkpoints
WARMUP_PREFIX = "warmup"


class JaxLearner:
    """Implements `rljax.engine.Learner`.

    Example:

        learner = JaxLearner(config, Pool("jax", fsdp=2, tensor=2), Path("models/SmolLM2"))
        metrics = learner.update(batch.replace(proximal_logp=learner.score(batch)))
    """

    def __init__(self, config: Config, pool: Pool, model_dir: Path) -> None:
        """Raises UserError for a model or a setting it can't do, or too few devices.

        config.total_train_steps, where it is set, is what schedules run over; without it only a constant rate will do.
        """
        self._config = config
        self._model_dir = Path(model_dir)
        self._mesh = pool_mesh(pool)
        self._policy = Policy(config, self._mesh, self._model_dir)
        self._objective = Objective.from_config(config)
        self._sft = config.actor.loss == "sft"
        self._score = self._policy.program(self._logp_of)
        self._updates = 0  # optimizer steps of the policy, those of the warm-up not counted
        self._supervised: Phase | None = None
        self._actor: Phase | None = None
        self._critic: Critic | None = None
        self._reference: Tree | None = None  # like policy.trained, in the compute dtype
        if config.warmup.steps == 0:
            self._begin()

    # Scoring

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the tokens under the current policy. [R, T] float32, nats; 0 where loss_mask is False."""
        if self._config.jax.bitwise:
            return self._score_bitwise(batch)
        return self._forward(batch, self._score, self._policy.trained)

    def score_reference(self, batch: Batch) -> np.ndarray:
        """The same under the frozen reference policy: the policy as it was when RL began. Only with kl_ctl > 0."""
        self._begin()
        if self._reference is None:
            raise UserError("actor.kl_ctl: there is no reference policy at 0")
        return self._forward(batch, self._score, self._reference)

    def values(self, batch: Batch) -> np.ndarray:
        """What the critic expects before each token is drawn. [R, T] float32, reward units. Only with adv_estimator "gae"."""
        self._begin()
        return self._forward(batch, self._need_critic().values, self._need_critic().trained)

    def _forward(self, batch: Batch, program: Callable[..., jax.Array], trained: Tree) -> np.ndarray:
        """Runs the micro-batches one after the other and reads them all at once."""
        cut = micro_batches(batch, batch.loss_mask, self._mesh, self._config.actor.mb_spec.rows_per_mb)
        with jax.set_mesh(self._mesh):
            outputs = [program(trained, self._policy.frozen, part) for part in cut.parts]
        return cut.scatter(jax.device_get(outputs))

    def _score_bitwise(self, batch: Batch) -> np.ndarray:
        alone, places = one_a_row(batch)
        scorer = scorer_of(self._config, self._policy.spec, self._mesh)
        out = np.zeros(batch.shape, np.float32)
        for (row, start, stop), logp in zip(places, scorer(self._policy.merged(), alone), strict=True):
            out[row, start:stop] = logp
        return np.where(batch.loss_mask, out, np.float32(0))

    def _logp_of(self, model: Transformer, rows: Rows) -> jax.Array:
        return self._logprobs(model, rows, self._config.gconfig.temperature)[0]

    def _logprobs(self, model: Transformer, rows: Rows, temperature: float) -> tuple[jax.Array, jax.Array]:
        return named_logprobs(model, rows, self._mesh, temperature=temperature, chunk=self._config.actor.logprob_chunk)

    # Learning

    def update(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the policy on all rows of the batch (and nothing of the critic).

        Metrics are under `ppo_actor/update/`, unweighted over the tokens trained on. A gradient that isn't finite is skipped
        and counted in `ppo_actor/update/skipped`.
        """
        self._begin()
        assert self._actor is not None
        anchor = self._score_bitwise(batch) if self._config.jax.bitwise and not self._sft else None
        means = self._step(self._actor, batch, kept(batch, self._objective), anchor)
        self._updates += 1
        return means

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the critic, on every token of loss_mask."""
        self._begin()
        critic = self._need_critic()
        cut = micro_batches(batch, batch.loss_mask, self._mesh, self._config.actor.mb_spec.rows_per_mb)
        with jax.set_mesh(self._mesh):
            return critic.update(cut.parts)

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer, at temperature 1."""
        if self._supervised is None:
            self._supervised = self._warmup_phase()
        return self._step(self._supervised, batch, batch.loss_mask & (batch.loss_weight != 0), None)

    def _step(self, phase: Phase, batch: Batch, keep: np.ndarray, anchor: np.ndarray | None) -> dict[str, Mean]:
        cut = micro_batches(batch, keep, self._mesh, self._config.actor.mb_spec.rows_per_mb, anchor=anchor)
        with jax.set_mesh(self._mesh):
            self._policy.trained, means = phase.step(self._policy.trained, self._policy.frozen, cut.parts)
        return means

    def _policy_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        temperature = 1.0 if self._sft else self._config.gconfig.temperature
        logp, entropy = self._logprobs(self._policy.model(trained, frozen), rows, temperature)
        if rows.anchor is not None:  # the gradient of this program, at the very numbers that the scorer gave
            logp = rows.anchor + (logp - jax.lax.stop_gradient(logp))
        return policy_objective(logp, entropy, rows.tokens, self._objective)

    def _supervised_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        logp, _ = self._logprobs(self._policy.model(trained, frozen), rows, 1.0)
        return supervised_objective(logp, rows.tokens.loss_weight, rows.tokens.mask)

    # Phases

    def _begin(self) -> None:
        """RL begins: the reference and the critic are made of the policy as it is, and the warm-up's moments are let go."""
        if self._actor is not None:
            return
        actor = self._config.actor
        self._supervised = None
        self._actor = self._actor_phase()
        if actor.kl_ctl > 0:
            dtype = self._policy.dtype
            self._reference = jax.jit(lambda t: jax.tree.map(lambda a: jnp.array(a, dtype, copy=True), t))(self._policy.trained)
        if actor.adv_estimator == "gae":
            self._critic = Critic(self._config, self._policy, self._total(self._config.critic.ppo_n_minibatches))

    def _actor_phase(self) -> Phase:
        actor, key = self._config.actor, "actor.optimizer"
        total = self._total(1 if self._sft else actor.ppo_n_minibatches)
        return Phase(self._policy_loss, actor.optimizer, total, key, PREFIX, self._policy.trained, self._mesh)

    def _warmup_phase(self) -> Phase:
        warmup, key = self._config.warmup, "warmup.optimizer"
        total = warmup.steps or None
        return Phase(self._supervised_loss, warmup.optimizer, total, key, PREFIX, self._policy.trained, self._mesh)

    def _total(self, each: int) -> int | None:
        """Optimizer steps of the run, `each` a training step."""
        steps = self._config.total_train_steps
        return None if steps is None else steps * each

    def _need_critic(self) -> Critic:
        if self._critic is None:
            raise UserError(f"actor.adv_estimator: {self._config.actor.adv_estimator!r} has no critic (gae has)")
        return self._critic

    # Weights and checkpoints

    def export(self, directory: Path | None) -> WeightSource:
        """Weights for a sampler: in memory when directory is None, else HF safetensors, config and tokenizer there.

        In memory they are copies in `jax.sampler_dtype` that later updates leave alone; adapters are merged in both forms.
        """
        if directory is None:
            with jax.set_mesh(self._mesh):
                return WeightSource(params=self._policy.published())
        with jax.set_mesh(self._mesh):
            params = self._policy.merged()
        hf.save(params, self._policy.spec, directory, dtype=self._config.actor.dtype, source=self._model_dir)
        return WeightSource(directory=Path(directory))

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        checkpoint.save_tree(Path(directory), self._saved(), self._meta())

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it was."""
        directory = Path(directory)
        meta = checkpoint.read_meta(directory)
        expected = self._meta()
        if meta.get("format") != FORMAT or meta.get("model") != expected["model"]:
            raise UserError(f"checkpoint: {directory} is of another model or engine (use the config it was written with)")
        fresh = self._phases_of(meta)
        tree = checkpoint.restore_tree(directory, fresh._saved())
        raise NotImplementedError
