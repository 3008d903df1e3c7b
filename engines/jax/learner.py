"""The JAX learner: one policy (and a critic where the algorithm has one) over a mesh of data, fsdp and tensor axes.

    batch -> micro-batches on the mesh -> gradients summed -> one optimizer step -> metrics, in one transfer

Master weights and moments are float32, computed with in `actor.dtype`; log-probs only of the tokens that are trained on.
With LoRA the base is frozen and the adapters are what is trained, optimised and saved. The reference policy and the critic
are taken from the policy as it is when RL begins: at once, or after the supervised warm-up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.backends.jax import checkpoint, hf, multihost
from rljax.backends.jax.accumulate import Metrics
from rljax.backends.jax.forward import named_logprobs, named_objective
from rljax.backends.jax.mesh import dispatching, pool_mesh
from rljax.backends.jax.model import Transformer
from rljax.backends.jax.objective import policy_objective
from rljax.backends.jax.profile import StepTrace
from rljax.batching.batch import Batch
from rljax.batching.compaction import kept
from rljax.checkpoints import portable
from rljax.checkpoints.integrity import read_meta
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import State, WeightSource
from rljax.engines.jax import FORMAT, state
from rljax.engines.jax.critic import Critic
from rljax.engines.jax.phase import Phase
from rljax.engines.jax.policy import Policy
from rljax.engines.jax.rows import MicroBatches, Rows, micro_batches, one_a_row
from rljax.engines.jax.scoring import scorer_of
from rljax.engines.jax.state import Reinforcement
from rljax.errors import UserError
from rljax.hf.flops import update_flops
from rljax.metrics.mean import Mean
from rljax.metrics.throughput import throughput
from rljax.objective.spec import PREFIX, Objective

Tree = Any  # a pytree of arrays


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
        if config.jax.bitwise and jax.process_count() > 1:
            raise UserError("jax.bitwise: the sampler is of one process, so the learner must be too (see docs/processes.md)")
        self._policy = Policy(config, self._mesh, self._model_dir)
        self._objective = Objective.from_config(config)
        self._sft = config.actor.loss == "sft"
        self._score = self._policy.program(self._logp_of)
        self._trace = StepTrace(config.jax.profile)
        self._updates = 0  # optimizer steps of the policy, those of the warm-up not counted
        self._supervised: Phase | None = None  # the warm-up
        self._rl: Reinforcement | None = None
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
        reference = self._reinforcement().reference
        if reference is None:
            raise UserError("actor.kl_ctl: there is no reference policy at 0")
        return self._forward(batch, self._score, reference)

    def values(self, batch: Batch) -> np.ndarray:
        """What the critic expects before each token is drawn. [R, T] float32, reward units. Only with adv_estimator "gae"."""
        critic = self._critic()
        return self._forward(batch, critic.values, critic.trained)

    def _forward(self, batch: Batch, program: Callable[..., jax.Array], trained: Tree) -> np.ndarray:
        """Runs the micro-batches one after the other and reads them all at once."""
        cut = self._cut(batch, batch.loss_mask)
        with jax.set_mesh(self._mesh):
            outputs = [self._dispatched(program, trained, part) for part in cut.parts]
        return cut.scatter(jax.device_get(outputs))

    def _cut(self, batch: Batch, keep: np.ndarray, anchor: np.ndarray | None = None) -> MicroBatches:
        rows = self._config.actor.mb_spec.rows_per_mb
        return micro_batches(batch, keep, self._mesh, rows, self._policy.attention, anchor=anchor)

    def _dispatched(self, program: Callable[..., jax.Array], trained: Tree, part: Rows) -> jax.Array:
        with dispatching(self._mesh):
            return program(trained, self._policy.frozen, part)

    def _score_bitwise(self, batch: Batch) -> np.ndarray:
        alone, parts = one_a_row(batch)
        scorer = scorer_of(self._config, self._policy.spec, self._mesh)
        out = np.zeros(batch.shape, np.float32)
        for (row, start, stop), logp in zip(parts, scorer(self._policy.merged(), alone), strict=True):
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
        actor = self._reinforcement().actor
        anchor = self._score_bitwise(batch) if self._config.jax.bitwise and not self._sft else None
        keep = kept(batch, self._objective)
        began = time.perf_counter()
        with self._trace.step():
            means = self._step(actor, batch, keep, anchor)
        seconds = time.perf_counter() - began
        self._updates += 1
        return means | self._throughput(batch, keep, seconds)

    def _throughput(self, batch: Batch, keep: np.ndarray, seconds: float) -> dict[str, Mean]:
        adapters = self._config.actor.lora.rank > 0
        flops = update_flops(self._policy.spec, batch.segment_ids, int(keep.sum()), adapters=adapters)
        tokens, device = int(np.count_nonzero(batch.segment_ids)), self._mesh.local_devices[0].device_kind
        return throughput("update", tokens, flops, seconds, device, self._mesh.size)

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the critic, on every token of loss_mask."""
        critic = self._critic()
        cut = self._cut(batch, batch.loss_mask)
        with jax.set_mesh(self._mesh):
            return critic.update(cut.parts)

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer, at temperature 1.

        With actor.loss "sft" there is no warm-up: it is a step of the policy's own optimizer.
        """
        if self._sft:
            return self.update(batch)
        if self._supervised is None:
            self._supervised = self._warmup_phase()
        return self._step(self._supervised, batch, batch.loss_mask & (batch.loss_weight != 0), None)

    def _step(self, phase: Phase, batch: Batch, keep: np.ndarray, anchor: np.ndarray | None) -> dict[str, Mean]:
        cut = self._cut(batch, keep, anchor)
        with jax.set_mesh(self._mesh):
            self._policy.trained, means = phase.step(self._policy.trained, self._policy.frozen, cut.parts)
        return means

    def _policy_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        temperature = 1.0 if self._sft else self._config.gconfig.temperature
        model = self._policy.model(trained, frozen)
        if rows.anchor is None:
            return self._fused(model, rows, self._objective, temperature)
        # The gradient of this program, at the very numbers that the scorer gave
        logp, entropy = self._logprobs(model, rows, temperature)
        logp = rows.anchor + (logp - jax.lax.stop_gradient(logp))
        return policy_objective(logp, entropy, rows.tokens, self._objective)

    def _supervised_loss(self, trained: Tree, frozen: Tree, rows: Rows) -> tuple[jax.Array, Metrics]:
        return self._fused(self._policy.model(trained, frozen), rows, Objective(loss="sft"), 1.0)

    def _fused(self, model: Transformer, rows: Rows, objective: Objective, temperature: float) -> tuple[jax.Array, Metrics]:
        chunk = self._config.actor.logprob_chunk
        return named_objective(model, rows, self._mesh, objective, temperature=temperature, chunk=chunk)

    # Phases

    def _begin(self) -> None:
        """RL begins: the reference and the critic are made of the policy as it is, and the warm-up's moments are let go."""
        if self._rl is None:
            self._rl, self._supervised = self._rl_phase(), None

    def _rl_phase(self) -> Reinforcement:
        config = self._config
        with jax.set_mesh(self._mesh):
            reference = self._policy.copied(self._policy.dtype) if config.actor.kl_ctl > 0 else None
            critic = Critic(config, self._policy, self._total(config.critic.ppo_n_minibatches)) if _has_critic(config) else None
            return Reinforcement(self._actor_phase(), critic, reference)

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

    def _reinforcement(self) -> Reinforcement:
        self._begin()
        assert self._rl is not None
        return self._rl

    def _critic(self) -> Critic:
        critic = self._reinforcement().critic
        if critic is None:
            raise UserError(f"actor.adv_estimator: {self._config.actor.adv_estimator!r} has no critic (gae has)")
        return critic

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
        hf.save(
            params,
            self._policy.spec,
            directory,
            dtype="float32" if self._config.jax.bitwise else self._config.actor.dtype,
            source=self._model_dir,
        )
        return WeightSource(directory=Path(directory))

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        meta = self._identity() | {"updates": self._updates, "phases": list(self._phases())}
        checkpoint.save_tree(Path(directory), self._saved(self._supervised, self._rl), meta)

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it was.

        Neither the mesh that wrote it matters nor the engine (rljax/checkpoints/portable.py). Old and new state are both held
        until all of the new one has been read.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        portable.check_origin(directory, meta, self._identity())
        if meta["format"] != FORMAT:
            self._load_placed(lambda: portable.read_foreign(directory, meta, self._config), meta["updates"])
            return
        supervised, rl = self._phases_of("supervised" in meta["phases"], "rl" in meta["phases"])
        tree = checkpoint.restore_tree(directory, self._saved(supervised, rl))
        self._load(tree, supervised, rl, meta["updates"])

    def named_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Everything that is trained, in no framework's terms, on the host: the parts of rljax/checkpoints/portable.py."""
        return state.to_named(self._saved(self._supervised, self._rl), self._table())

    def load_named_state(self, named: State, updates: int) -> None:
        """The inverse, after `updates` optimizer steps. Raises UserError, changing nothing, where they don't fit.

        A critic or reference that is missing stays as it is when RL begins.
        """
        self._load_placed(lambda: named, updates)

    def _load_placed(self, read: Callable[[], State], updates: int) -> None:
        """Each process reads all of it, and puts its part on its devices."""
        found: list[tuple[Tree, Phase | None, Reinforcement | None]] = []

        def place() -> None:
            named = read()
            supervised, rl = self._phases_of(*portable.phases_of(named))
            tree = state.from_named(named, self._saved(supervised, rl), self._table(), updates)
            found.append((tree, supervised, rl))

        multihost.together(place)
        self._load(*found[0], updates)

    def _phases_of(self, supervised: bool, rl: bool) -> tuple[Phase | None, Reinforcement | None]:
        """Those there are already, or new ones."""
        warmup = (self._supervised or self._warmup_phase()) if supervised else None
        return warmup, (self._rl or self._rl_phase()) if rl else None

    def _load(self, tree: Tree, supervised: Phase | None, rl: Reinforcement | None, updates: int) -> None:
        self._policy.trained = tree["policy"]
        self._supervised, self._rl, self._updates = supervised, rl, updates
        if supervised is not None:
            supervised.load(tree["supervised"])
        if rl is not None:
            rl.load(tree["rl"])

    def _table(self) -> state.Table:
        return state.table_of(self._policy.spec, self._identity()["lora"])

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be this run's, but for the format. JSON values."""
        lora = self._config.actor.lora
        adapters = {"rank": lora.rank, "target_modules": list(lora.target_modules)} if lora.rank else None
        return {"format": FORMAT, "model": json.loads(json.dumps(self._policy.spec.to_config())), "lora": adapters}

    def _saved(self, supervised: Phase | None, rl: Reinforcement | None) -> Tree:
        tree: dict[str, Tree] = {"policy": self._policy.trained}
        if supervised is not None:
            tree["supervised"] = supervised.saved()
        if rl is not None:
            tree["rl"] = rl.saved(with_reference=self._config.warmup.steps > 0)  # else the model directory has it
        return tree

    def _phases(self) -> dict[str, Any]:
        return {name: phase for name, phase in (("supervised", self._supervised), ("rl", self._rl)) if phase is not None}

    def compilations(self) -> int:
        """Programs compiled for updates and scoring so far."""
        steps = [self._supervised, self._rl and self._rl.actor]
        return self._score._cache_size() + sum(phase.compilations() for phase in steps if phase)

    def close(self) -> None:
        """Lets go of everything on the devices, and of the other processes."""
        self._supervised = self._rl = None
        self._policy.trained = self._policy.frozen = {}
        multihost.leave()


def _has_critic(config: Config) -> bool:
    return config.actor.adv_estimator == "gae"
