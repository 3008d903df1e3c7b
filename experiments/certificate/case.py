"""Inputs that experiments.parity gives to every engine and to the oracle, and the results of each."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import numpy as np

from rljax.batching import packing
from rljax.batching.batch import Batch
from rljax.batching.packing import Packing
from rljax.config.schema import Config, OptimizerConfig
from rljax.engines.http.config import SglangConfig
from rljax.engines.jax.config import JaxConfig
from rljax.hf.spec import ModelSpec
from rljax.objective.aggregation import loss_weights
from rljax.objective.spec import Objective
from rljax.types import PROMPT_VERSION, Finish, Trajectory

STEPS = 100  # assumed if the data decides the number of steps; only the schedule uses it
ADAPTER, HEAD = ".lora_", "value_head"  # in the names of tensors

Vector = np.ndarray  # [N], one entry per trained token, in the order of the trajectories
Arrays = list[np.ndarray]  # one [T] array per trajectory
Tensors = dict[str, np.ndarray]  # by Hugging Face name


@dataclasses.dataclass(frozen=True)
class Case:
    """A minibatch, and a learner's settings and weights."""

    config: Config
    model_dir: Path
    trajectories: tuple[Trajectory, ...]
    packing: Packing
    arrays: dict[str, Arrays]  # by field of `Batch`
    optimizer: OptimizerConfig  # the run's own, with its clipping, for the optimizers alone

    @property
    def objective(self) -> Objective:
        return Objective.from_config(self.config)

    @property
    def update_temperature(self) -> float:
        """Temperature at which an update takes log-probs: 1 for supervised training."""
        return 1.0 if self.config.actor.loss == "sft" else self.config.gconfig.temperature

    @property
    def batch(self) -> Batch:
        return packing.batch_of(self.trajectories, self.packing, **self.arrays)

    def trained(self, rows: np.ndarray) -> Vector:
        """Reads the trained tokens of [R, T] rows, in float64."""
        arrays = self.packing.gather(rows)
        return np.concatenate([a[t.loss_mask] for a, t in zip(arrays, self.trajectories, strict=True)]).astype(np.float64)

    def with_arrays(self, **arrays: Arrays) -> Case:
        return dataclasses.replace(self, arrays=self.arrays | arrays)

    def weights(self, part: str, name: str, initial: np.ndarray) -> np.ndarray:
        """Returns a tensor of the learner's state, float32, from its initial value.

        Adapters and the critic are moved away from where they begin: there an adapter changes
        nothing, and a critic is the policy with a head of zeros.
        """
        if part == "params" and ADAPTER not in name:
            return initial
        random = np.random.default_rng([self.config.seed, zlib.crc32(f"{part}/{name}".encode())])
        scale = 0.2 if ADAPTER in name or name == HEAD else 0.002
        moved = random.normal(0.0, scale, initial.shape).astype(np.float32)
        return moved if ADAPTER in name else initial + moved

    @property
    def total_steps(self) -> int:
        assert self.config.total_train_steps is not None  # `make_case` has set it
        return self.config.total_train_steps * self.config.actor.ppo_n_minibatches

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of the gradient in two steps; equal ones would not show the betas."""
        return (1.0, -0.5)

    def gradient(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draws float64 noise for the optimizers alone, some of it so small that eps counts."""
        random = np.random.default_rng([self.config.seed, zlib.crc32(tensor.encode())])
        return random.normal(size=shape) * 10.0 ** random.uniform(-10, -2, shape)


@dataclasses.dataclass(frozen=True)
class Update:
    """One optimizer step, of the policy or the critic."""

    loss: float
    gradients: Tensors
    entropy: float | None = None  # mean over the trained tokens, nats; None for the critic and for sft
    step: Tensors = dataclasses.field(default_factory=dict)  # change of the master weights; the oracle has no optimizer
    slope: float = 0.0  # norm of the loss's gradient in log-probs and entropies, or in values; the oracle's alone

    @property
    def norm(self) -> float:
        """Global norm of the gradient."""
        return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in self.gradients.values())))


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of a learner or of the oracle. None where the config has no such part."""

    logp: Vector  # at the sampling temperature, nats
    policy: Update
    reference: Vector | None = None  # log-probs under the reference policy, after the update
    values: Vector | None = None  # the critic's, reward units
    critic: Update | None = None
    grad_norm: float | None = None  # the learner's metric


def make_case(config: Config, model_dir: Path, dtype: str, sequences: int, length: int) -> Case:
    """Draws random trajectories and advantages, and packs them several to a row.

    Log-probs of the other policies are those of a uniform policy until `with_policies_near`.
    """
    optimizer, config = config.actor.optimizer, _certified(config, dtype)
    vocabulary = ModelSpec.from_directory(model_dir).vocab_size
    length = min(length, config.actor.mb_spec.max_tokens_per_row)
    random = np.random.default_rng(config.seed)
    trajectories = []
    for _ in range(sequences):
        tokens = int(random.integers(-(-length // 2), length + 1))
        mask = np.arange(tokens) >= max(tokens // 4, 1)
        mask[tokens // 2 : tokens // 2 + tokens // 8] = False  # a turn that others spoke
        trajectories.append(
            Trajectory(
                token_ids=random.integers(0, vocabulary, tokens).astype(np.int32),
                loss_mask=mask,
                behavior_logp=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
                versions=np.where(mask, 0, PROMPT_VERSION).astype(np.int32),
                reward=0.0,
                components={},
                finish=Finish.STOP,
            )
        )
    masks = [t.loss_mask for t in trajectories]
    arrays = {
        "loss_weight": loss_weights(masks, config.actor.loss_aggregation, config.aggregation_constant),
        "advantage": [np.where(mask, random.normal(), 0).astype(np.float32) for mask in masks],
    }
    if config.actor.adv_estimator == "gae":
        for name in ("values", "returns"):
            arrays[name] = [np.where(mask, random.normal(size=mask.shape), 0).astype(np.float32) for mask in masks]
    lengths = [len(t) for t in trajectories]
    packed = packing.pack(lengths, min(2 * length, config.actor.mb_spec.max_tokens_per_row))
    return Case(config, model_dir, tuple(trajectories), packed, arrays, optimizer)


def _certified(config: Config, dtype: str) -> Config:
    """Returns the config of a learner whose moments after one step show its gradient.

    Nothing is clipped (the optimizers alone clip) or skipped, RL begins at once, and every part
    computes in `dtype`.
    """
    actor, critic, jax, sglang = config.actor, config.critic, JaxConfig.of(config), SglangConfig.of(config)
    return dataclasses.replace(
        config,
        total_train_steps=config.total_train_steps or STEPS,
        actor=dataclasses.replace(actor, dtype=dtype, optimizer=dataclasses.replace(actor.optimizer, gradient_clipping=0.0)),
        critic=dataclasses.replace(critic, optimizer=dataclasses.replace(critic.optimizer, gradient_clipping=0.0)),
        guard=dataclasses.replace(config.guard, enabled=False),
        warmup=dataclasses.replace(config.warmup, steps=0),
        engines={
            **config.engines,
            "jax": dataclasses.replace(jax, sampler_dtype=dtype, cache_dtype=dtype),
            "sglang": dataclasses.replace(sglang, dtype=dtype),
        },
    )


def with_policies_near(case: Case, logp: Vector) -> Case:
    """Draws the other policies' log-probs around the model's own.

    Ratios are well inside the clip or well outside: a token that rounding carries over its edge
    would be a difference of dtype and not of arithmetic.
    """
    random, objective = np.random.default_rng(case.config.seed), case.objective
    proximal = logp - random.choice([-1.0, -0.05, 0.05, 1.0], logp.shape)
    behavior = proximal + random.normal(0, 0.1, logp.shape)
    trajectories = tuple(
        dataclasses.replace(t, behavior_logp=array)
        for t, array in zip(case.trajectories, _scattered(case, behavior), strict=True)
    )
    arrays = {}
    if objective.proximal == "recomputed":
        arrays["proximal_logp"] = proximal
    if objective.proximal == "interpolated":
        arrays["interpolation"] = random.uniform(size=logp.shape)
    if objective.kl_coef:
        arrays["reference_logp"] = logp + random.normal(0, 0.1, logp.shape)
    if objective.distill_coef:
        arrays["teacher_logp"] = logp + random.normal(0, 0.1, logp.shape)
    case = dataclasses.replace(case, trajectories=trajectories)
    return case.with_arrays(**{name: _scattered(case, vector) for name, vector in arrays.items()})


def _scattered(case: Case, vector: Vector) -> Arrays:
    """Puts a value per trained token into [T] arrays, 0 elsewhere."""
    arrays, start = [], 0
    for t in case.trajectories:
        array = np.zeros(len(t), np.float32)
        count = int(t.loss_mask.sum())
        array[t.loss_mask], start = vector[start : start + count], start + count
        arrays.append(array)
    return arrays
