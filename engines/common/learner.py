"""A learner but for its arithmetic: which phase it is in, what it writes, and how it goes on from
what another wrote.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from rljax.batching.batch import Batch
from rljax.batching.compaction import kept
from rljax.checkpoints import portable
from rljax.checkpoints.integrity import read_meta
from rljax.config.schema import Config
from rljax.engine import PortableState
from rljax.engines.common.phases import CriticT, Phases, PhaseT, Reinforcement, Tree
from rljax.errors import UserError
from rljax.hf.flops import update_flops
from rljax.hf.spec import ModelSpec
from rljax.metrics.mean import Mean
from rljax.metrics.throughput import throughput
from rljax.objective.spec import Objective

Result = TypeVar("Result")
Scorer = Callable[[Batch], np.ndarray]  # as `Learner.score`


class PhasedLearner(abc.ABC, Generic[PhaseT, CriticT]):
    """Implements those parts of `rljax.engine.Learner` in which no array is touched; a framework's
    learner adds the others.

    The reference policy and the critic are taken from the policy as it is when RL begins: at once,
    or after the supervised warm-up. The teacher is there from the start and in no checkpoint, for
    its directory has it. A subclass calls `_start` when it can make them.
    """

    format: ClassVar[str]  # of its checkpoints, in their meta.json

    def __init__(self, config: Config, model_dir: Path) -> None:
        """config.total_train_steps, where it is set, is what schedules run over; without it only a
        constant rate will do.
        """
        self._config = config
        self._model_dir = Path(model_dir)
        self._spec = ModelSpec.from_directory(model_dir)
        self._objective = Objective.from_config(config)
        self._sft = config.actor.loss == "sft"
        self._updates = 0  # optimizer steps of the policy, those of the warm-up not counted
        self._phases: Phases[PhaseT, CriticT] = Phases()
        self._teacher: Scorer | None = None

    # What a framework's learner adds

    def _enter(self) -> None:
        """What every call begins with."""

    @abc.abstractmethod
    def _make_actor(self, total_steps: int | None) -> PhaseT:
        """The optimizer of `actor.optimizer` on the policy objective."""

    @abc.abstractmethod
    def _make_warmup(self, total_steps: int | None) -> PhaseT:
        """The optimizer of `warmup.optimizer` on the negative log-likelihood."""

    @abc.abstractmethod
    def _make_critic(self, total_steps: int | None) -> CriticT:
        """A critic that starts from the policy of now."""

    @abc.abstractmethod
    def _copy_policy(self) -> Tree:
        """What is trained of the policy of now, in the compute dtype."""

    @abc.abstractmethod
    def _load_teacher(self, directory: Path) -> Scorer:
        """A frozen model that scores what the policy sampled.

        Raises UserError where it can't be loaded.
        """

    @abc.abstractmethod
    def _policy_step(self, phase: PhaseT, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        """One step of the policy objective on the tokens in keep, [R, T] bool."""

    @abc.abstractmethod
    def _devices(self) -> tuple[str, int]:
        """What the framework calls a device of the pool, and how many there are."""

    @abc.abstractmethod
    def _supervised_step(self, phase: PhaseT, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        """One step of the negative log-likelihood on the tokens in keep, [R, T] bool."""

    @abc.abstractmethod
    def _score_with(self, weights: Tree, batch: Batch) -> np.ndarray:
        """`score` under other weights, as `_copy_policy` gives them."""

    @abc.abstractmethod
    def _weights(self) -> Tree:
        """What is trained of the policy: the storage itself."""

    @abc.abstractmethod
    def _set_weights(self, weights: Tree) -> None: ...

    @abc.abstractmethod
    def _write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> None:
        """Writes a checkpoint under a directory that need not exist.

        Raises UserError, in every process or in none.
        """

    @abc.abstractmethod
    def _read(self, directory: Path, like: Tree) -> Tree:
        """The tree of a checkpoint of this framework, in the layout of `like`.

        Raises UserError, as `_write` does.
        """

    @abc.abstractmethod
    def _to_named(self, tree: Tree) -> dict[str, dict[str, np.ndarray]]:
        """A tree as the parts of `rljax.checkpoints.portable`, on the host of every process."""

    @abc.abstractmethod
    def _from_named(self, state: PortableState, tree: Tree, updates: int) -> Tree:
        """The tree with what a state has of it, and its own elsewhere.

        Raises UserError where something doesn't fit.
        """

    @abc.abstractmethod
    def _together(self, what: str, action: Callable[[], Result]) -> Result:
        """Runs an action in every process; where it raises UserError in one, it does in all. what:
        went wrong then.
        """

    def _read_meta(self, directory: Path) -> dict[str, Any]:
        return read_meta(directory)

    # Scoring and learning

    def score_reference(self, batch: Batch) -> np.ndarray:
        """The log-probs of `score` under the frozen reference policy: as it was when RL began.

        Only with kl_ctl > 0.
        """
        reference = self._reinforcement().reference
        if reference is None:
            raise UserError("actor.kl_ctl: there is no reference policy at 0")
        return self._score_with(reference, batch)

    def score_teacher(self, batch: Batch) -> np.ndarray:
        """The log-probs of `score` under the teacher of actor.distill.teacher. Only with one."""
        if self._teacher is None:
            raise UserError("actor.distill.teacher: empty, so there is no teacher to score with")
        return self._teacher(batch)

    def update(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the policy on all rows of the batch (and nothing of the critic).

        Metrics are under `ppo_actor/update/`, unweighted over the tokens trained on. A gradient
        that isn't finite is skipped and counted in `ppo_actor/update/skipped`.
        """
        actor, keep = self._reinforcement().actor, kept(batch, self._objective)
        began = time.perf_counter()
        means = self._policy_step(actor, batch, keep)
        seconds = time.perf_counter() - began
        self._updates += 1
        return means | self._throughput(batch, keep, seconds)

    def _throughput(self, batch: Batch, keep: np.ndarray, seconds: float) -> dict[str, Mean]:
        """Tokens per second and MFU of an update that took so long."""
        adapters = self._config.actor.lora.rank > 0
        flops = update_flops(self._spec, batch.segment_ids, int(keep.sum()), adapters=adapters)
        return throughput("update", int(np.count_nonzero(batch.segment_ids)), flops, seconds, *self._devices())

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer,
        at temperature 1.

        With actor.loss "sft" there is no warm-up: it is a step of the policy's own optimizer.
        """
        if self._sft:
            return self.update(batch)
        if self._phases.supervised is None:
            self._phases = Phases(self._new_warmup(), self._phases.rl)
        supervised = self._phases.supervised
        assert supervised is not None
        return self._supervised_step(supervised, batch, batch.loss_mask & (batch.loss_weight != 0))

    # Phases

    def _start(self) -> None:
        """Loads the teacher where there is one, and begins RL where the config has no warm-up."""
        if self._config.actor.distill.teacher:
            self._teacher = self._load_teacher(Path(self._config.actor.distill.teacher))
        if self._config.warmup.steps == 0:
            self._reinforcement()

    def _reinforcement(self) -> Reinforcement[PhaseT, CriticT]:
        """What RL has; where it has not begun it does now, and the warm-up's moments are let go."""
        if self._phases.rl is None:
            self._phases = Phases(None, self._new_rl())
        assert self._phases.rl is not None
        return self._phases.rl

    def _critic(self) -> CriticT:
        critic = self._reinforcement().critic
        if critic is None:
            raise UserError(f"actor.adv_estimator: {self._config.actor.adv_estimator!r} has no critic (gae has)")
        return critic

    def _new_rl(self) -> Reinforcement[PhaseT, CriticT]:
        actor = self._config.actor
        reference = self._copy_policy() if actor.kl_ctl > 0 else None
        has_critic = actor.adv_estimator == "gae"
        critic = self._make_critic(self._optimizer_steps(self._config.critic.ppo_n_minibatches)) if has_critic else None
        steps = self._optimizer_steps(1 if self._sft else actor.ppo_n_minibatches)
        return Reinforcement(self._make_actor(steps), critic, reference)

    def _new_warmup(self) -> PhaseT:
        return self._make_warmup(self._config.warmup.steps or None)

    def _optimizer_steps(self, per_step: int) -> int | None:
        """Of the whole run, from those per training step."""
        steps = self._config.total_train_steps
        return None if steps is None else steps * per_step

    # Checkpoints

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        self._enter()
        meta = self._identity() | {"updates": self._updates, "phases": self._phases.names}
        self._write(Path(directory), self._tree(self._phases), meta)

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it
        was.

        Neither the layout that wrote it matters nor the engine (rljax/checkpoints/portable.py).
        Old and new state are both held until all of the new one has been read.
        """
        self._enter()
        directory = Path(directory)
        meta = self._read_meta(directory)
        portable.check_origin(directory, meta, self._identity())
        if meta["format"] != self.format:
            what = f"{directory} can't be restored"
            self._load_named(what, lambda: portable.read_foreign(directory, meta, self._config), meta["updates"])
            return
        phases = self._existing_or_new("supervised" in meta["phases"], "rl" in meta["phases"])
        self._load(phases, self._read(directory, self._tree(phases)), meta["updates"])

    def named_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Everything that is trained, in no framework's terms, on the host of every process: the
        parts of rljax/checkpoints/portable.py.
        """
        self._enter()
        return self._to_named(self._tree(self._phases))

    def load_named_state(self, named: PortableState, updates: int) -> None:
        """The inverse, after `updates` optimizer steps. Raises UserError, changing nothing, where
        they don't fit.

        A critic or reference that is missing stays as it is when RL begins.
        """
        self._enter()
        self._load_named("a state can't be loaded", lambda: named, updates)

    def _load_named(self, what: str, read: Callable[[], PortableState], updates: int) -> None:
        """Each process reads all of it, a part at a time, and keeps its share."""

        def place() -> tuple[Phases[PhaseT, CriticT], Tree]:
            state = read()
            phases = self._existing_or_new(*portable.phases_of(state))
            return phases, self._from_named(state, self._tree(phases), updates)

        phases, tree = self._together(what, place)
        self._load(phases, tree, updates)

    def _existing_or_new(self, supervised: bool, rl: bool) -> Phases[PhaseT, CriticT]:
        """Those there are already, or new ones that are not in use yet."""
        now = self._phases
        warmup = (now.supervised or self._new_warmup()) if supervised else None
        return Phases(warmup, (now.rl or self._new_rl()) if rl else None)

    def _load(self, phases: Phases[PhaseT, CriticT], tree: Tree, updates: int) -> None:
        self._set_weights(tree["policy"])
        self._phases, self._updates = phases, updates
        phases.load(tree)

    def _tree(self, phases: Phases[PhaseT, CriticT]) -> Tree:
        """The reference is in it only after a warm-up: else the model directory has it."""
        return phases.saved(self._weights(), with_reference=self._config.warmup.steps > 0)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be this run's, but for the format.

        JSON values.
        """
        lora = self._config.actor.lora
        adapters = {"rank": lora.rank, "target_modules": list(lora.target_modules)} if lora.rank else None
        return {"format": self.format, "model": json.loads(json.dumps(self._spec.to_config())), "lora": adapters}
