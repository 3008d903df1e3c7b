"""The PyTorch learner: a policy, perhaps a critic, under FSDP2 over the axes of a rank mesh.

    batch -> this rank's rows -> micro-batches -> gradients summed over both -> one optimizer step
          -> metrics, the same on every rank

It runs in every process of its pool. All of them call each method in the same order, with the same
whole batch. Master weights and moments are float32, and computation is in `actor.dtype`. Log-probs
are computed only for the tokens that are trained on. With LoRA the base is frozen, and the adapters
are trained, optimized and saved. The reference policy and the critic are copies of the policy when
RL begins: at once, or after the supervised warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch import checkpoint, lora
from rljax.backends.torch.accumulate import Loss, Metrics
from rljax.backends.torch.export import Gathering, gathered, write
from rljax.backends.torch.forward import target_logprobs, target_objective
from rljax.backends.torch.mesh import RankMesh
from rljax.batching.batch import Batch
from rljax.batching.packing import RANK_SPREAD
from rljax.checkpoints.background import WAIT_SHARE, BackgroundWrite
from rljax.config.allocation import Pool
from rljax.config.schema import Config, OptimizerConfig
from rljax.engine import (
    ExportTarget,
    ExportToDirectory,
    ExportToSampler,
    PortableState,
    WeightsAtLeader,
    WeightsInDirectory,
    WeightSource,
)
from rljax.engines.common.learner import PhasedLearner, Result, Scorer
from rljax.engines.common.phases import Phases, Tree
from rljax.engines.cuda import FORMAT
from rljax.engines.cuda.learning import distributed, state
from rljax.engines.cuda.learning.adapters import AdapterUpdates
from rljax.engines.cuda.learning.critic import Critic
from rljax.engines.cuda.learning.phase import Phase
from rljax.engines.cuda.learning.policy import Policy
from rljax.engines.cuda.learning.rows import MicroBatches, Rows, micro_batches
from rljax.engines.cuda.learning.teacher import Teacher
from rljax.engines.cuda.transports.routes import Route
from rljax.engines.http.config import SglangConfig
from rljax.hf.activations import logit_rows
from rljax.hf.read_model import read_model
from rljax.metrics.guardrails import UpdateBound, update_bounds
from rljax.metrics.mean import Mean
from rljax.objective.spec import PREFIX, ROUNDED_AWAY, Objective


class TorchLearner(PhasedLearner[Phase, Critic]):
    """Implements `rljax.engine.Learner`.

    Example, in each of two processes:

        learner = TorchLearner(config, Pool("fsdp", fsdp=2), Path("models/SmolLM2"))
        metrics = learner.update(batch.replace(proximal_logp=learner.score(batch)))
    """

    format = FORMAT

    def __init__(self, config: Config, pool: Pool, model_dir: Path, *, described: bool = False) -> None:
        """Joins the other processes and loads the model.

        Args:
          described: no weights are read, for tensors that have no data.

        Raises:
          UserError: the model or a setting is not supported, or the processes don't fit the pool.
        """
        super().__init__(config, model_dir, read_model(model_dir))
        self._rank_mesh: RankMesh = distributed.join(pool, config.recover.hang_timeout)
        self._policy = Policy(config, self._rank_mesh, self._model_dir, described=described)
        self._chunk = logit_rows(config.actor.logprob_chunk, self._model.vocab_size)
        self._publishing: Gathering | None = None
        self._saves: checkpoint.Saves | None = None  # beside other calls
        self._route: Route | None = None  # transport of the last publish from memory
        self._start()

    # Scoring

    def score(self, batch: Batch) -> np.ndarray:
        """Returns log-probs of the tokens under the current policy.

        [R, T] float32, nats; 0 where loss_mask is False.
        """
        cut = self._cut(batch, batch.loss_mask)
        return cut.scatter(self._policy.scored(self._logp_of, cut))

    def _score_with(self, weights: Tree, batch: Batch) -> np.ndarray:
        with self._policy.copied_in(list(weights.values())):
            return self.score(batch)

    def values(self, batch: Batch) -> np.ndarray:
        """Returns the critic's value of the context before each token.

        [R, T] float32, reward units. Raises UserError unless actor.adv_estimator is "gae".
        """
        critic = self._critic()
        cut = self._cut(batch, batch.loss_mask)
        return cut.scatter(critic.values(cut))

    def _cut(self, batch: Batch, keep: np.ndarray) -> MicroBatches:
        self._enter()
        vision = self._policy.network.vision
        token = None if vision is None else vision.token_id
        return micro_batches(batch, keep, self._rank_mesh, self._model, self._config.actor.mb_spec.rows_per_mb, token)

    def _logp_of(self, rows: Rows) -> Tensor:
        temperature = self._config.gconfig.temperature
        return target_logprobs(self._policy.network, rows, temperature=temperature, chunk=self._chunk)[0]

    # Learning

    def _policy_step(self, phase: Phase, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        cut = self._cut(batch, keep)
        means = self._step(phase, self._policy_loss, cut)
        return means | ({RANK_SPREAD: Mean.of([cut.spread])} if self._rank_mesh.data_shard[1] > 1 else {})

    def _devices(self) -> tuple[str, int]:
        device = self._rank_mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return name, self._rank_mesh.pool.size

    def _memory_in_use(self) -> int | None:
        device = self._rank_mesh.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    def _memory_peak(self) -> int | None:
        device = self._rank_mesh.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def _supervised_step(self, phase: Phase, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        return self._step(phase, self._supervised_loss, self._cut(batch, keep))

    def _step(self, phase: Phase, loss: Loss, cut: MicroBatches) -> dict[str, Mean]:
        if not self._config.actor.lora.rank:
            return phase.step(loss, cut)
        before = AdapterUpdates(self._policy, self._config.actor.lora)
        return phase.step(loss, cut) | {ROUNDED_AWAY: before.rounded_away()}

    def _critic_step(self, critic: Critic, batch: Batch) -> dict[str, Mean]:
        return critic.update(self._cut(batch, batch.loss_mask))

    def _policy_loss(self, rows: Rows) -> tuple[Tensor, Metrics]:
        return self._loss(rows, self._objective, 1.0 if self._sft else self._config.gconfig.temperature)

    def _supervised_loss(self, rows: Rows) -> tuple[Tensor, Metrics]:
        return self._loss(rows, Objective(loss="sft"), 1.0)

    def _loss(self, rows: Rows, objective: Objective, temperature: float) -> tuple[Tensor, Metrics]:
        return target_objective(self._policy.network, rows, objective, temperature=temperature, chunk=self._chunk)

    # Phases

    def _make_actor(self, total_steps: int | None) -> Phase:
        bounds = update_bounds(self._config.guard, "skip")
        return self._phase(self._config.actor.optimizer, total_steps, "actor.optimizer", bounds)

    def _make_warmup(self, total_steps: int | None) -> Phase:
        return self._phase(self._config.warmup.optimizer, total_steps, "warmup.optimizer")

    def _phase(
        self, optimizer: OptimizerConfig, total_steps: int | None, key: str, bounds: Sequence[UpdateBound] = ()
    ) -> Phase:
        published = None if self._config.actor.lora.rank else self._policy.dtype
        return Phase(self._policy, optimizer, total_steps, key, PREFIX, bounds=bounds, published=published)

    def _make_critic(self, total_steps: int | None) -> Critic:
        return Critic(self._config, self._policy, total_steps)

    def _load_teacher(self, directory: Path) -> Scorer:
        teacher = Teacher(self._config, directory, self._rank_mesh)

        def score(batch: Batch) -> np.ndarray:
            cut = self._cut(batch, batch.loss_mask)
            return cut.scatter(teacher.score(cut))

        return score

    def _copy_policy(self) -> Tree:
        return self._policy.by_name(self._policy.copied(self._policy.dtype))

    # Weights and checkpoints

    def export(self, target: ExportTarget) -> WeightSource:
        """Exports weights for a sampler: to a directory as HF files, or to servers from memory.

        Adapters are merged either way. A source gathers its tensors one at a time while it sends
        them, by the target's transport. Only rank 0 gets it; the other ranks gather with it before
        they return.
        """
        self._enter()
        if isinstance(target, ExportToDirectory):
            spec, dtype = self._model, self._config.actor.dtype
            write(spec, self._whole, target.directory, dtype=dtype, source=self._model_dir, rank_mesh=self._rank_mesh)
            return WeightsInDirectory(target.directory)
        gathering, route = Gathering(self._model, self._whole), self._route_to(target)
        if self._rank_mesh.rank != 0:
            route.follow(gathering)
            return WeightsAtLeader()
        self._publishing = gathering
        return route.source(gathering)

    def _route_to(self, target: ExportToSampler) -> Route:
        """Returns the transport to a sampler, the same on every rank; kept for the next publish."""
        if self._route is None or self._route.target != target:
            if self._route is not None:
                self._route.close()
            gather = distributed.gather if self._rank_mesh.pool.size > 1 else None
            bucket = SglangConfig.of(self._config).bucket_mb << 20
            self._route = Route(target, bucket_bytes=bucket, wait=self._config.control_timeout, gather=gather)
        return self._route

    def _enter(self) -> None:
        """Sets the thread's device and ends an unfinished publish; public methods begin with it.

        If a server failed in the middle of a publish, the other ranks still wait to gather the
        remaining tensors.
        """
        self._rank_mesh.set_device()
        if self._publishing is not None:
            self._publishing.close()
            self._publishing = None

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """Gathers a tensor of the model in `actor.dtype`, with adapters merged, on every rank.

        A collective.
        """
        self._rank_mesh.set_device()  # the thread that sends the tensors calls this
        parameters = self._policy.frozen | self._policy.trained

        def gather(name: str) -> Tensor:
            return gathered(parameters[name], self._policy.dtype)

        adapters = self._config.actor.lora
        scale = adapters.alpha / adapters.rank if adapters.rank else 0.0
        return lora.merged(name, gather(name), gather, parameters, scale)

    def _weights(self) -> Tree:
        return self._policy.by_name(self._policy.weights())

    def _set_weights(self, weights: Tree) -> None:
        self._policy.fill([weights[name] for name in self._policy.trained])

    def _write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> None:
        checkpoint.save(directory, state.to_dtensors(tree, self._policy), meta, self._rank_mesh)

    def _begin_write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> BackgroundWrite:
        if self._saves is None:
            group = distributed.cpu_group(WAIT_SHARE * self._config.recover.hang_timeout)
            self._saves = checkpoint.Saves(self._rank_mesh, group)
        tensors = functools.partial(state.to_dtensors, tree, self._policy)
        needed = state.bytes_of(tree, self._policy)
        return self._saves.begin(directory, tensors, needed, meta)

    def _read(self, directory: Path, like: Tree) -> Tree:
        tensors = checkpoint.empty_like(state.to_dtensors(like, self._policy))
        checkpoint.restore(directory, tensors, self._rank_mesh)
        return state.shards(tensors)

    def _read_meta(self, directory: Path) -> dict[str, Any]:
        return checkpoint.meta_of(directory, self._rank_mesh)

    def _to_named(self, tree: Tree) -> dict[str, dict[str, np.ndarray]]:
        return state.to_named(tree, self._policy)

    def _from_named(self, named: PortableState, tree: Tree, updates: int) -> Tree:
        return state.from_named(named, tree, self._policy, updates)

    def _together(self, what: str, action: Callable[[], Result]) -> Result:
        result = checkpoint.on_all_ranks(self._rank_mesh, what, action)
        assert result is not None  # for the action runs on every rank
        return result

    def close(self) -> None:
        """Frees everything on the device.

        The process group stays, for the next learner of the same processes.
        """
        self._enter()
        self._await_copy()
        if self._route is not None:
            self._route.close()
        if self._saves is not None:
            self._saves.close()
        self._phases, self._teacher, self._route = Phases(), None, None
        if self.__dict__.pop("_policy", None) is not None:
            distributed.leave()
