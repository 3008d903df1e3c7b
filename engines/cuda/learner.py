"""The PyTorch learner: one policy (and a critic where the algorithm has one) under FSDP2 over data, fsdp, context and tensor.

    batch -> this rank's rows -> micro-batches -> gradients summed over both -> one optimizer step -> metrics, whole everywhere

It lives in every process of its pool. Each method is called by all of them, in the same order, with the same whole batch.
Master weights and moments are float32, computed with in `actor.dtype`; log-probs only of the tokens that are trained on.
With LoRA the base is frozen and the adapters are what is trained, optimised and saved. The reference policy and the critic
are taken from the policy as it is when RL begins: at once, or after the supervised warm-up.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch import checkpoint, lora
from rljax.backends.torch.accumulate import Metrics
from rljax.backends.torch.export import Gathering, gathered, write
from rljax.backends.torch.forward import named_logprobs, named_objective
from rljax.backends.torch.mesh import Layout
from rljax.batching.batch import Batch
from rljax.batching.compaction import kept
from rljax.batching.packing import RANK_SPREAD
from rljax.checkpoints import portable
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import State, WeightSource, allocate, transport_of
from rljax.engines.cuda import FORMAT, distributed, state
from rljax.engines.cuda.critic import Critic
from rljax.engines.cuda.phase import Phase
from rljax.engines.cuda.policy import Policy
from rljax.engines.cuda.rows import MicroBatches, Rows, micro_batches
from rljax.engines.cuda.state import Reinforcement
from rljax.engines.cuda.transports import Route
from rljax.errors import UserError
from rljax.hf.flops import update_flops
from rljax.metrics.mean import Mean
from rljax.metrics.throughput import throughput
from rljax.objective.spec import PREFIX, Objective


class TorchLearner:
    """Implements `rljax.engine.Learner`.

    Example:

        learner = TorchLearner(config, Pool("fsdp", fsdp=2), Path("models/SmolLM2"))  # in each of two processes
        metrics = learner.update(batch.replace(proximal_logp=learner.score(batch)))
    """

    def __init__(self, config: Config, pool: Pool, model_dir: Path) -> None:
        """Raises UserError for a model or a setting it can't do, or processes that don't fit the pool.

        config.total_train_steps, where it is set, is what schedules run over; without it only a constant rate will do.
        """
        self._config = config
        self._model_dir = Path(model_dir)
        self._layout: Layout = distributed.join(pool)
        self._policy = Policy(config, self._layout, self._model_dir)
        self._objective = Objective.from_config(config)
        self._sft = config.actor.loss == "sft"
        self._updates = 0  # optimizer steps of the policy, those of the warm-up not counted
        self._supervised: Phase | None = None  # the warm-up
        self._rl: Reinforcement | None = None
        self._publishing: Gathering | None = None
        self._route: Route | None = None  # to the servers, where one was chosen
        if config.warmup.steps == 0:
            self._begin()

    # Scoring

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the tokens under the current policy. [R, T] float32, nats; 0 where loss_mask is False."""
        cut = self._cut(batch, batch.loss_mask)
        return cut.scatter(self._policy.scored(self._logp_of, cut))

    def score_reference(self, batch: Batch) -> np.ndarray:
        """The same under the frozen reference policy: the policy as it was when RL began. Only with kl_ctl > 0."""
        reference = self._reinforcement().reference
        if reference is None:
            raise UserError("actor.kl_ctl: there is no reference policy at 0")
        with self._policy.reading(reference):
            return self.score(batch)

    def values(self, batch: Batch) -> np.ndarray:
        """What the critic expects before each token is drawn. [R, T] float32, reward units. Only with adv_estimator "gae"."""
        critic = self._critic()
        cut = self._cut(batch, batch.loss_mask)
        return cut.scatter(critic.values(cut))

    def _cut(self, batch: Batch, keep: np.ndarray) -> MicroBatches:
        self._enter()
        return micro_batches(batch, keep, self._layout, self._policy.spec, self._config.actor.mb_spec.rows_per_mb)

    def _logp_of(self, rows: Rows) -> Tensor:
        actor, temperature = self._config.actor, self._config.gconfig.temperature
        return named_logprobs(self._policy.network, rows, temperature=temperature, chunk=actor.logprob_chunk)[0]

    # Learning

    def update(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the policy on all rows of the batch (and nothing of the critic).

        Metrics are under `ppo_actor/update/`, unweighted over the tokens trained on. A gradient that isn't finite is skipped
        and counted in `ppo_actor/update/skipped`.
        """
        actor = self._reinforcement().actor
        keep = kept(batch, self._objective)
        began = time.perf_counter()
        cut = self._cut(batch, keep)
        means = actor.step(self._policy_loss, cut)
        means |= self._throughput(batch, keep, time.perf_counter() - began)
        self._updates += 1
        return means | ({RANK_SPREAD: Mean.of([cut.spread])} if self._layout.dealt[1] > 1 else {})

    def _throughput(self, batch: Batch, keep: np.ndarray, seconds: float) -> dict[str, Mean]:
        adapters, device = self._config.actor.lora.rank > 0, self._layout.device
        flops = update_flops(self._policy.spec, batch.segment_ids, int(keep.sum()), adapters=adapters)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return throughput("update", int(np.count_nonzero(batch.segment_ids)), flops, seconds, name, self._layout.pool.size)

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the critic, on every token of loss_mask."""
        return self._critic().update(self._cut(batch, batch.loss_mask))

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer, at temperature 1.

        With actor.loss "sft" there is no warm-up: it is a step of the policy's own optimizer.
        """
        if self._sft:
            return self.update(batch)
        if self._supervised is None:
            self._supervised = self._warmup_phase()
        return self._supervised.step(self._supervised_loss, self._cut(batch, batch.loss_mask & (batch.loss_weight != 0)))

    def _policy_loss(self, rows: Rows) -> tuple[Tensor, Metrics]:
        return self._loss(rows, self._objective, 1.0 if self._sft else self._config.gconfig.temperature)

    def _supervised_loss(self, rows: Rows) -> tuple[Tensor, Metrics]:
        return self._loss(rows, Objective(loss="sft"), 1.0)

    def _loss(self, rows: Rows, objective: Objective, temperature: float) -> tuple[Tensor, Metrics]:
        chunk = self._config.actor.logprob_chunk
        return named_objective(self._policy.network, rows, objective, temperature=temperature, chunk=chunk)

    # Phases

    def _begin(self) -> None:
        """RL begins: the reference and the critic are made of the policy as it is, and the warm-up's moments are let go."""
        if self._rl is None:
            self._rl, self._supervised = self._rl_phase(), None

    def _rl_phase(self) -> Reinforcement:
        config, policy = self._config, self._policy
        reference = policy.copied(policy.dtype) if config.actor.kl_ctl > 0 else None
        has_critic = config.actor.adv_estimator == "gae"
        critic = Critic(config, policy, self._total(config.critic.ppo_n_minibatches)) if has_critic else None
        return Reinforcement(self._actor_phase(), critic, reference)

    def _actor_phase(self) -> Phase:
        actor = self._config.actor
        total = self._total(1 if self._sft else actor.ppo_n_minibatches)
        return Phase(self._policy, actor.optimizer, total, "actor.optimizer", PREFIX)

    def _warmup_phase(self) -> Phase:
        warmup = self._config.warmup
        return Phase(self._policy, warmup.optimizer, warmup.steps or None, "warmup.optimizer", PREFIX)

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
        """Weights for a sampler: to servers in memory when directory is None, else HF safetensors, config and tokenizer there.

        Adapters are merged in both forms. In memory rank 0 gets a source whose tensors are gathered one at a time as they are
        sent, by the way that `rljax.engine.transport_of` finds; the other ranks gather with it before they return.
        """
        self._enter()
        if directory is not None:
            spec, dtype = self._policy.spec, self._config.actor.dtype
            write(spec, self._whole, directory, dtype=dtype, source=self._model_dir, layout=self._layout)
            return WeightSource(directory=Path(directory))
        gathering, route = Gathering(self._policy.spec, self._whole), self._to_servers()
        if self._layout.rank != 0:
            route.follow(gathering)
            return WeightSource()
        self._publishing = gathering
        return route.source(gathering)

    def _to_servers(self) -> Route:
        """The same on every rank."""
        if self._route is None:
            pools = allocate(self._config)
            transport = transport_of(self._config, pools)
            assert pools.sampler is not None
            gather = distributed.gather if self._layout.pool.size > 1 else None
            bucket = self._config.sglang.bucket_mb << 20
            self._route = Route(transport, pools.sampler, bucket_bytes=bucket, gather=gather)
        return self._route

    def _enter(self) -> None:
        """What every call begins with.

        Where a server failed in the middle of a publish, the other ranks still wait for the rest of the tensors to be gathered.
        """
        self._layout.enter()
        if self._publishing is not None:
            self._publishing.close()
            self._publishing = None

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """A tensor of the model in `actor.dtype`, adapters merged, on every rank. A collective."""
        self._layout.enter()  # whoever sends the tensors asks for them
        parameters = self._policy.frozen | self._policy.trained

        def gather(name: str) -> Tensor:
            return gathered(parameters[name], self._policy.dtype)

        adapters = self._config.actor.lora
        scale = adapters.alpha / adapters.rank if adapters.rank else 0.0
        return lora.merged(name, gather(name), gather, parameters, scale)

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        self._enter()
        meta = self._identity() | {"updates": self._updates, "phases": list(self._phases())}
        checkpoint.save(
            Path(directory), state.placed(self._saved(self._supervised, self._rl), self._policy), meta, self._layout
        )

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it was.

        Neither the layout that wrote it matters nor the engine (rljax/checkpoints/portable.py). Old and new state are both held
        until all of the new one has been read.
        """
        self._enter()
        directory = Path(directory)
        meta = checkpoint.meta_of(directory, self._layout)
        portable.check_origin(directory, meta, self._identity())
        supervised, rl = self._phases_of("supervised" in meta["phases"], "rl" in meta["phases"])
        if meta["format"] != FORMAT:
            self._move_in(directory, meta, supervised, rl)
            return
        tensors = checkpoint.empty_like(state.placed(self._saved(supervised, rl), self._policy))
        checkpoint.restore(directory, tensors, self._layout)
        self._load(state.shards(tensors), supervised, rl, meta["updates"])

    def _move_in(self, directory: Path, meta: dict[str, Any], supervised: Phase | None, rl: Reinforcement | None) -> None:
        """From another engine's checkpoint: each rank reads all of it, a place at a time, and keeps its shards."""

        def read() -> state.Tree:
            named = portable.read_foreign(directory, meta, self._config)
            return state.from_named(named, self._saved(supervised, rl), self._policy, meta["updates"])

        tree = checkpoint.together(self._layout, f"{directory} can't be restored", read)
        assert tree is not None  # it is read on every rank
        self._load(tree, supervised, rl, meta["updates"])

    def named_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Everything that is trained, in no framework's terms, float32, on the host of every rank (law 9): the parts of
        rljax/checkpoints/portable.py.
        """
        self._enter()
        return state.to_named(self._saved(self._supervised, self._rl), self._policy)

    def load_named_state(self, named: State, updates: int) -> None:
        """The inverse, after `updates` optimizer steps. Raises UserError, changing nothing, where they don't fit.

        A critic or reference that is missing stays as it is when RL begins.
        """
        self._enter()
        supervised, rl = self._phases_of(*portable.phases_of(named))
        tree = state.from_named(named, self._saved(supervised, rl), self._policy, updates)
        self._load(tree, supervised, rl, updates)

    def _phases_of(self, supervised: bool, rl: bool) -> tuple[Phase | None, Reinforcement | None]:
        """Those there are already, or new ones."""
        warmup = (self._supervised or self._warmup_phase()) if supervised else None
        return warmup, (self._rl or self._rl_phase()) if rl else None

    def _saved(self, supervised: Phase | None, rl: Reinforcement | None) -> state.Tree:
        """The reference is in it only after a warm-up: else the model directory has it."""
        return state.saved(self._policy, supervised, rl, with_reference=self._config.warmup.steps > 0)

    def _load(self, tree: state.Tree, supervised: Phase | None, rl: Reinforcement | None, updates: int) -> None:
        self._policy.fill([tree["policy"][name] for name in self._policy.trained])
        self._supervised, self._rl, self._updates = supervised, rl, updates
        if supervised is not None:
            supervised.load(tree["supervised"])
        if rl is not None:
            rl.load(tree["rl"], list(self._policy.trained))

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be this run's, but for the format. JSON values."""
        lora = self._config.actor.lora
        adapters = {"rank": lora.rank, "target_modules": list(lora.target_modules)} if lora.rank else None
        return {"format": FORMAT, "model": json.loads(json.dumps(self._policy.spec.to_config())), "lora": adapters}

    def _phases(self) -> dict[str, Any]:
        return {name: phase for name, phase in (("supervised", self._supervised), ("rl", self._rl)) if phase is not None}

    def close(self) -> None:
        """Lets go of everything on the device. The processes' own group stays."""
        self._enter()
        if self._route is not None:
            self._route.close()
        self._supervised = self._rl = self._route = None
        self.__dict__.pop("_policy", None)
