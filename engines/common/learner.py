"""The framework-free part of a learner: phases, checkpoints, and restoring those of other engines."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from rljax.batching.batch import Batch
from rljax.batching.compaction import kept
from rljax.checkpoints import portable
from rljax.checkpoints.background import BackgroundWrite
from rljax.checkpoints.integrity import read_meta
from rljax.config.schema import Config
from rljax.engine import PortableState
from rljax.engines.common.phases import CriticT, Phases, PhaseT, Reinforcement, Tree
from rljax.errors import UserError
from rljax.hf.flops import update_flops
from rljax.hf.other_model import Model
from rljax.metrics.mean import Mean
from rljax.metrics.throughput import throughput
from rljax.objective.spec import Objective

Result = TypeVar("Result")
Scorer = Callable[[Batch], np.ndarray]  # such as `Learner.score`


class PhasedLearner(abc.ABC, Generic[PhaseT, CriticT]):
    """The methods of `rljax.engine.Learner` that touch no array; subclasses add the others.

    The reference policy and the critic are copies of the policy when RL begins: at once, or after
    the supervised warm-up. The teacher is loaded at the start. No checkpoint has it, for its
    directory does. A subclass calls `_start` when it can make them.
    """

    format: ClassVar[str]  # format of its checkpoints, in their meta.json

    def __init__(self, config: Config, model_dir: Path, model: Model) -> None:
        """Reads the objective.

        Schedules run over config.total_train_steps. Without it only a constant rate is possible.
        """
        self._config = config
        self._model_dir = Path(model_dir)
        self._model = model
        self._objective = Objective.from_config(config)
        self._sft = config.actor.loss == "sft"
        self._updates = 0  # optimizer steps of the policy, without the warm-up's
        self._phases: Phases[PhaseT, CriticT] = Phases()
        self._teacher: Scorer | None = None
        self._lr_factor = 1.0
        self._copied: Future[None] | None = None  # of a save that goes on
        self._waited = 0.0  # seconds, for copies

    # Implemented by a framework's learner

    def _enter(self) -> None:
        """Prepares for a call; runs at the beginning of each public method."""

    @abc.abstractmethod
    def _make_actor(self, total_steps: int | None) -> PhaseT:
        """Makes the optimizer of `actor.optimizer`, for the policy objective."""

    @abc.abstractmethod
    def _make_warmup(self, total_steps: int | None) -> PhaseT:
        """Makes the optimizer of `warmup.optimizer`, for the negative log-likelihood."""

    @abc.abstractmethod
    def _make_critic(self, total_steps: int | None) -> CriticT:
        """Makes a critic that starts from the current policy."""

    @abc.abstractmethod
    def _copy_policy(self) -> Tree:
        """Copies the trained weights of the current policy, in the compute dtype."""

    @abc.abstractmethod
    def _load_teacher(self, directory: Path) -> Scorer:
        """Loads a frozen model and returns the function that scores with it.

        Raises UserError if it can't be loaded.
        """

    @abc.abstractmethod
    def _policy_step(self, phase: PhaseT, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        """Takes one step of the policy objective on the tokens in keep, [R, T] bool."""

    @abc.abstractmethod
    def _devices(self) -> tuple[str, int]:
        """Returns the framework's name of a device of the pool, and the number of devices."""

    @abc.abstractmethod
    def _memory_in_use(self) -> int | None:
        """Returns the bytes in use on this process's devices; None if they don't tell."""

    @abc.abstractmethod
    def _supervised_step(self, phase: PhaseT, batch: Batch, keep: np.ndarray) -> dict[str, Mean]:
        """Takes one step of the negative log-likelihood on the tokens in keep, [R, T] bool."""

    @abc.abstractmethod
    def _critic_step(self, critic: CriticT, batch: Batch) -> dict[str, Mean]:
        """Takes one optimizer step of the critic, on all tokens of loss_mask."""

    @abc.abstractmethod
    def _score_with(self, weights: Tree, batch: Batch) -> np.ndarray:
        """Computes `score` under other weights, such as `_copy_policy` returns."""

    @abc.abstractmethod
    def _weights(self) -> Tree:
        """Returns the trained weights of the policy: the storage itself, not a copy."""

    @abc.abstractmethod
    def _set_weights(self, weights: Tree) -> None: ...

    @abc.abstractmethod
    def _write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> None:
        """Writes a checkpoint to a directory, which may not exist yet.

        Raises UserError, in all processes or in none.
        """

    @abc.abstractmethod
    def _begin_write(self, directory: Path, tree: Tree, meta: dict[str, Any]) -> BackgroundWrite:
        """Writes a checkpoint as `_write` does, beside the calls that follow."""

    @abc.abstractmethod
    def _read(self, directory: Path, like: Tree) -> Tree:
        """Reads the tree of a checkpoint of this framework, sharded as `like` is.

        Raises UserError, in all processes or in none.
        """

    @abc.abstractmethod
    def _to_named(self, tree: Tree) -> dict[str, dict[str, np.ndarray]]:
        """Converts a tree to the parts of `rljax.checkpoints.portable`, on every process's host."""

    @abc.abstractmethod
    def _from_named(self, state: PortableState, tree: Tree, updates: int) -> Tree:
        """Fills a tree from a portable state; parts that the state lacks stay as they are.

        Raises UserError if an array doesn't fit.
        """

    @abc.abstractmethod
    def _together(self, what: str, action: Callable[[], Result]) -> Result:
        """Runs an action in every process. If it raises UserError in one, all of them raise.

        Args:
          what: what could not be done, for the message.
        """

    def _read_meta(self, directory: Path) -> dict[str, Any]:
        return read_meta(directory)

    # Scoring and learning

    def score_reference(self, batch: Batch) -> np.ndarray:
        """Scores the batch as `score` does, under the reference policy: the policy when RL began.

        [R, T] float32, nats. Raises UserError if actor.kl_ctl is 0.
        """
        self._await_copy()  # for weights may be copied in
        reference = self._reinforcement().reference
        if reference is None:
            raise UserError("actor.kl_ctl: 0, so there is no reference policy to score with")
        return self._score_with(reference, batch)

    def score_teacher(self, batch: Batch) -> np.ndarray:
        """Scores the batch as `score` does, under the teacher of actor.distill.teacher.

        [R, T] float32, nats. Raises UserError if there is no teacher.
        """
        if self._teacher is None:
            raise UserError("actor.distill.teacher: empty, so there is no teacher to score with")
        return self._teacher(batch)

    def update(self, batch: Batch) -> dict[str, Mean]:
        """Takes one optimizer step of the policy (not of the critic) on all rows of the batch.

        Metrics are under `ppo_actor/update/`, unweighted over the tokens trained on. A gradient
        that isn't finite is skipped and counted in `ppo_actor/update/skipped`; one that breaks a
        bound whose action is "skip", in `ppo_actor/update/out_of_bounds`.
        """
        self._await_copy()
        actor, keep = self._reinforcement().actor, kept(batch)
        began = time.perf_counter()
        means = self._policy_step(actor, batch, keep)
        seconds = time.perf_counter() - began
        self._updates += 1
        return means | self._throughput(batch, keep, seconds) | self._memory() | self._take_waited()

    def _memory(self) -> dict[str, Mean]:
        used, peak = self._memory_in_use(), self._memory_peak()
        found = {} if used is None else {"perf/device_memory_bytes": Mean(used, 1)}
        return found if peak is None else found | {"memory/learner_peak_bytes": Mean(peak, 1)}

    def _memory_peak(self) -> int | None:
        """Returns the most bytes that were in use so far on the fullest of this process's devices.

        None where the devices don't tell.
        """
        return None

    def _throughput(self, batch: Batch, keep: np.ndarray, seconds: float) -> dict[str, Mean]:
        """Returns tokens per second and MFU of an update that took `seconds`."""
        adapters = self._config.actor.lora.rank > 0
        flops = update_flops(self._model, batch.segment_ids, int(keep.sum()), adapters=adapters)
        return throughput("update", int(np.count_nonzero(batch.segment_ids)), flops, seconds, *self._devices())

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """Takes one step of the negative log-likelihood, weighted by loss_weight, at temperature 1.

        It uses the warm-up's optimizer. With actor.loss "sft" there is no warm-up, and it is a step
        of the policy's own optimizer.
        """
        if self._sft:
            return self.update(batch)
        self._await_copy()
        if self._phases.supervised is None:
            self._phases = Phases(self._new_warmup(), self._phases.rl)
        supervised = self._phases.supervised
        assert supervised is not None
        means = self._supervised_step(supervised, batch, batch.loss_mask & (batch.loss_weight != 0))
        return means | self._take_waited()

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """Takes one optimizer step of the critic, on all tokens of loss_mask.

        Raises UserError unless actor.adv_estimator is "gae".
        """
        self._await_copy()
        return self._critic_step(self._critic(), batch) | self._take_waited()

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rates of later steps by `factor`, relative to their schedules.

        1 at the start. Checkpoints don't have it.
        """
        self._enter()
        self._lr_factor = factor
        self._phases.scale_lr(factor)

    # Phases

    def _start(self) -> None:
        """Loads the teacher if there is one, and begins RL if the config has no warm-up."""
        if self._config.actor.distill.teacher:
            self._teacher = self._load_teacher(Path(self._config.actor.distill.teacher))
        if self._config.warmup.steps == 0:
            self._reinforcement()

    def _reinforcement(self) -> Reinforcement[PhaseT, CriticT]:
        """Returns the state of RL. The first call begins it and frees the warm-up's moments."""
        if self._phases.rl is None:
            self._phases = Phases(None, self._new_rl())
        assert self._phases.rl is not None
        return self._phases.rl

    def _critic(self) -> CriticT:
        critic = self._reinforcement().critic
        if critic is None:
            raise UserError(f"actor.adv_estimator: {self._config.actor.adv_estimator!r} has no critic (gae has one)")
        return critic

    def _new_rl(self) -> Reinforcement[PhaseT, CriticT]:
        actor = self._config.actor
        reference = self._copy_policy() if actor.kl_ctl > 0 else None
        has_critic = actor.adv_estimator == "gae"
        critic = self._make_critic(self._optimizer_steps(self._config.critic.ppo_n_minibatches)) if has_critic else None
        steps = self._optimizer_steps(1 if self._sft else actor.ppo_n_minibatches)
        rl = Reinforcement(self._make_actor(steps), critic, reference)
        rl.scale_lr(self._lr_factor)
        return rl

    def _new_warmup(self) -> PhaseT:
        warmup = self._make_warmup(self._config.warmup.steps or None)
        warmup.scale_lr(self._lr_factor)
        return warmup

    def _optimizer_steps(self, per_step: int) -> int | None:
        """Converts optimizer steps per training step to those of the whole run."""
        steps = self._config.total_train_steps
        return None if steps is None else steps * per_step

    # Checkpoints

    def save(self, directory: Path) -> None:
        """Writes parameters, moments and step counts to a directory that does not exist yet."""
        self._enter()
        meta = self._identity() | {"updates": self._updates, "phases": self._phases.names}
        self._write(Path(directory), self._tree(self._phases), meta)

    def begin_save(self, directory: Path) -> Future[None]:
        """Begins a save of what the learner is now. The write goes on beside later calls.

        Those that change an array wait for the copy of all to the host, and report that wait as
        `timeperf/save_copy`. One save at a time.

        Returns:
          Its end in this process.
        """
        self._enter()
        self._await_copy()
        meta = self._identity() | {"updates": self._updates, "phases": self._phases.names}
        write = self._begin_write(Path(directory), self._tree(self._phases), meta)
        self._copied = write.copied
        return write.written

    def _await_copy(self) -> None:
        """Waits until the arrays may change: a save that goes on has copied them."""
        if self._copied is not None:
            began = time.perf_counter()
            self._copied.result()
            self._copied, self._waited = None, self._waited + time.perf_counter() - began

    def _take_waited(self) -> dict[str, Mean]:
        """Returns the seconds waited for copies since the last call, if there were copies."""
        seconds, self._waited = self._waited, 0.0
        return {"timeperf/save_copy": Mean(seconds, 1)} if seconds else {}

    def restore(self, directory: Path) -> None:
        """Restores a checkpoint written by any engine on any number of devices.

        Raises UserError if it is missing, foreign or corrupt, and leaves the learner unchanged: old
        and new state are both in memory until all of the new one is read. Conversion between
        engines is in rljax/checkpoints/portable.py.
        """
        self._enter()
        self._await_copy()
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
        """Returns everything that is trained as numpy arrays, on the host of every process.

        They are the parts of rljax/checkpoints/portable.py.
        """
        self._enter()
        return self._to_named(self._tree(self._phases))

    def load_named_state(self, named: PortableState, updates: int) -> None:
        """Loads what `named_state` returned, after `updates` optimizer steps.

        A critic or reference that is missing keeps its value from when RL begins. Raises UserError
        if an array doesn't fit, and changes nothing then.
        """
        self._enter()
        self._await_copy()
        self._load_named("a state can't be loaded", lambda: named, updates)

    def _load_named(self, what: str, read: Callable[[], PortableState], updates: int) -> None:
        """Loads a portable state.

        Each process reads all of it, one part at a time, and keeps its share.
        """

        def assemble() -> tuple[Phases[PhaseT, CriticT], Tree]:
            state = read()
            phases = self._existing_or_new(*portable.phases_of(state))
            return phases, self._from_named(state, self._tree(phases), updates)

        phases, tree = self._together(what, assemble)
        self._load(phases, tree, updates)

    def _existing_or_new(self, supervised: bool, rl: bool) -> Phases[PhaseT, CriticT]:
        """Returns the phases that exist, or new ones that are not in use yet."""
        now = self._phases
        warmup = (now.supervised or self._new_warmup()) if supervised else None
        return Phases(warmup, (now.rl or self._new_rl()) if rl else None)

    def _load(self, phases: Phases[PhaseT, CriticT], tree: Tree, updates: int) -> None:
        self._set_weights(tree["policy"])
        self._phases, self._updates = phases, updates
        phases.load(tree)

    def _tree(self, phases: Phases[PhaseT, CriticT]) -> Tree:
        """Builds a checkpoint's tree. The reference is in it only after a warm-up.

        Without one the model directory has the reference.
        """
        return phases.saved(self._weights(), with_reference=self._config.warmup.steps > 0)

    def _identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must share with this run, apart from the format; JSON values."""
        lora = self._config.actor.lora
        adapters = {"rank": lora.rank, "target_modules": list(lora.target_modules)} if lora.rank else None
        return {"format": self.format, "model": json.loads(json.dumps(self._model.to_config())), "lora": adapters}
