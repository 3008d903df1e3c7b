"""Learns the bigram table by the exact gradient of the oracle's objective, in one process or more."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rljax.batching import packing
from rljax.batching.batch import Batch
from rljax.config.schema import Config, OptimizerConfig
from rljax.engine import ExportTarget, ExportToDirectory, WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.fake import model
from rljax.engines.fake.collective import Alone, Collective
from rljax.errors import UserError
from rljax.metrics.guardrails import update_bounds
from rljax.metrics.mean import Mean, merge
from rljax.objective import oracle
from rljax.objective.spec import PREFIX, MeanArrays, Objective, TokenArrays
from rljax.rollout.batch_metrics import distribution

CHECKPOINT = "learner.safetensors"


class Adam:
    """Adam on one array, with a clipped gradient norm and a constant rate."""

    def __init__(self, config: OptimizerConfig, shape: tuple[int, ...]) -> None:
        self._config = config
        self._rate, self.rate_factor = config.lr, 1.0
        self.moments = np.zeros((2, *shape))
        self.steps = 0

    @property
    def rate(self) -> float:
        return self._rate * self.rate_factor

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """Returns what to add to the array."""
        config, norm = self._config, float(np.sqrt((gradient**2).sum()))
        if config.gradient_clipping and norm > config.gradient_clipping:
            gradient = gradient * (config.gradient_clipping / norm)
        self.steps += 1
        betas = np.array([config.beta1, config.beta2])
        powers = np.stack([gradient, gradient**2])
        self.moments = betas[:, None, None] * self.moments + (1 - betas)[:, None, None] * powers
        mean, square = self.moments / (1 - betas**self.steps)[:, None, None]
        return -self.rate * mean / (np.sqrt(square) + config.eps)


class FakeLearner:
    """A policy table, its reference, and a critic that depends on the last token only.

    Each of several processes has all of it, takes its own rows of a batch, and sums scores,
    gradients and metrics with the others, as a data-parallel learner does. So split invariance over
    ranks is tested on it.
    """

    def __init__(self, config: Config, model_dir: Path, peers: Collective | Alone | None = None) -> None:
        self._config, self._peers = config, peers or Alone()
        self._objective = Objective.from_config(config)
        self._temperature = config.gconfig.temperature
        self._table = model.read(model_dir)
        self._shape = json.loads((model_dir / "config.json").read_text())  # to refuse checkpoints of another model
        self._reference = self._table.copy()
        self._bounds = update_bounds(config.guard, "skip")
        self._teacher = _teacher_of(config, len(self._table))
        self._values = np.zeros((len(self._table), 1))
        self._adam = {
            "policy": Adam(config.actor.optimizer, self._table.shape),
            "warmup": Adam(config.warmup.optimizer, self._table.shape),
            "critic": Adam(config.critic.optimizer, self._values.shape),
        }

    def score(self, batch: Batch) -> np.ndarray:
        return self._score(self._table, batch)

    def score_reference(self, batch: Batch) -> np.ndarray:
        """Scores under the policy that RL began with: the model directory's, or the warmed-up one."""
        if not self._config.actor.kl_ctl:
            raise UserError("actor.kl_ctl: 0, so there is no reference policy to score with")
        return self._score(self._reference, batch)

    def score_teacher(self, batch: Batch) -> np.ndarray:
        if self._teacher is None:
            raise UserError("actor.distill.teacher: empty, so there is no teacher to score with")
        return self._score(self._teacher, batch)

    def _score(self, table: np.ndarray, batch: Batch) -> np.ndarray:
        logp = model.log_probs(table, self._temperature)[_last(batch), batch.token_ids]
        return self._whole(batch, np.where(batch.loss_mask, logp, 0.0))

    def values(self, batch: Batch) -> np.ndarray:
        if self._config.actor.adv_estimator != "gae":
            raise UserError(f"actor.adv_estimator: {self._config.actor.adv_estimator!r} has no critic (gae has one)")
        return self._whole(batch, np.where(batch.loss_mask, self._values[_last(batch), 0], 0.0))

    def update(self, batch: Batch) -> dict[str, Mean]:
        return self._step(batch, self._objective, "policy")

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        metrics = self._step(batch, Objective(loss="sft"), "policy" if self._config.actor.loss == "sft" else "warmup")
        self._reference = self._table.copy()
        return metrics

    def _step(self, batch: Batch, objective: Objective, optimizer: str) -> dict[str, Mean]:
        own = _rows(batch, self._parts(batch)[self._peers.rank])
        _, entropy = self._logp_and_entropy(own)
        loss, gradient, found = self.loss_and_gradient(own, objective)
        loss, gradient = float(self._peers.sum(np.array(loss))), self._peers.sum(gradient)
        metrics = {"loss": Mean(loss, 1), "grad_norm": Mean(float(np.sqrt((gradient**2).sum())), 1)}
        metrics |= {"lr": Mean(self._adam[optimizer].rate, 1)}
        of_tokens = {f"{PREFIX}/entropy": _mean(entropy, own.loss_mask)} | {name: Mean(*mean) for name, mean in found.items()}
        named = {f"{PREFIX}/{name}": mean for name, mean in metrics.items()} | self._merged(of_tokens)
        bounds = self._bounds if optimizer == "policy" else ()
        broken = any(bound.broken(named) for bound in bounds)
        if bounds:
            named[f"{PREFIX}/out_of_bounds"] = Mean(float(broken), 1)
        if not broken:
            self._table = (self._table + self._adam[optimizer].step(gradient)).astype(np.float32)
        named[f"{PREFIX}/optimizer_steps"] = Mean(self._adam[optimizer].steps, 1)
        return named | self._spread(batch)

    def scale_lr(self, factor: float) -> None:
        for adam in self._adam.values():
            adam.rate_factor = factor

    # Ranks

    def _parts(self, batch: Batch) -> list[np.ndarray]:
        """Returns the rows of each rank, of about the same cost; the same on every rank."""
        return packing.balance(packing.row_costs(batch.segment_ids), self._peers.size)

    def _spread(self, batch: Batch) -> dict[str, Mean]:
        """Returns how uneven the work of the ranks was."""
        if self._peers.size == 1:
            return {}
        return {packing.RANK_SPREAD: Mean.of([packing.spread(packing.row_costs(batch.segment_ids), self._parts(batch))])}

    def _whole(self, batch: Batch, array: np.ndarray) -> np.ndarray:
        """Combines all ranks' rows of [R, T] arrays, each taking its own. float32."""
        mine = np.zeros_like(array)
        rows = self._parts(batch)[self._peers.rank]
        mine[rows] = array[rows]
        return self._peers.sum(mine).astype(np.float32)

    def _merged(self, means: dict[str, Mean]) -> dict[str, Mean]:
        """Merges the means of all ranks, which have the same names in the same order."""
        parts = self._peers.gather(np.array([dataclasses.astuple(mean) for mean in means.values()]))
        return merge({name: Mean(*row) for name, row in zip(means, part.tolist(), strict=True)} for part in parts)

    def _logp_and_entropy(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns log-probs and entropy of the tokens, [R, T] float64, nats.

        Log-probs are rounded as the sampler reports them, so that a ratio of 1 is exactly 1.
        """
        table = model.log_probs(self._table, self._temperature)
        entropy = -(np.exp(table) * table).sum(1)
        last = _last(batch)
        return table[last, batch.token_ids].astype(np.float32).astype(np.float64), entropy[last]

    def loss_and_gradient(self, batch: Batch, objective: Objective) -> tuple[float, np.ndarray, dict[str, MeanArrays]]:
        """Returns the oracle's loss, its gradient in the table, [V, V], and its metrics.

        With z = logits / temperature of a row: d logp / dz = onehot - p and dH / dz = -p (log p +
        H).
        """
        logp, entropy = self._logp_and_entropy(batch)
        result = oracle.policy_objective(logp, entropy, _tokens(batch), objective)
        mask, last = batch.loss_mask, _last(batch)
        all_logp = model.log_probs(self._table, self._temperature)[last[mask]]  # [trained tokens, V]
        p, d_logp, d_entropy = np.exp(all_logp), result.d_logp[mask][:, None], result.d_entropy[mask][:, None]
        d_logits = -p * d_logp - d_entropy * p * (all_logp + entropy[mask][:, None])
        d_logits[np.arange(len(p)), batch.token_ids[mask]] += d_logp[:, 0]
        gradient = np.zeros(self._table.shape)
        np.add.at(gradient, last[mask], d_logits / self._temperature)
        return float(result.loss), gradient, result.metrics

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """Takes one step on the squared error to the returns, weighted by loss_weight."""
        own = _rows(batch, self._parts(batch)[self._peers.rank])
        assert own.returns is not None
        last, mask = _last(own), own.loss_mask
        value, target = self._values[last, 0][mask], own.returns[mask].astype(np.float64)
        gradient = np.zeros(self._values.shape)
        np.add.at(gradient, last[mask], (own.loss_weight[mask] * (value - target))[:, None])
        self._values = self._values + self._adam["critic"].step(self._peers.sum(gradient))
        error = (target - value) ** 2
        moments = {"squared_error": error, "squared_return": target**2, "loss": error / 2}
        means = {name: Mean(float(x.sum()), x.size) for name, x in moments.items()}
        means |= {"value": distribution(value), "return": distribution(target)}
        return self._merged({f"critic/{name}": mean for name, mean in means.items()})

    def export(self, target: ExportTarget) -> WeightSource:
        if not isinstance(target, ExportToDirectory):
            return WeightsInMemory(self._table.copy())
        if self._peers.rank == 0:
            model.write(target.directory, self._table)
        return WeightsInDirectory(target.directory)

    def save(self, directory: Path) -> None:
        if self._peers.rank > 0:
            return
        directory.mkdir(parents=True)
        arrays = {"table": self._table, "reference": self._reference, "values": self._values}
        arrays |= {f"moments.{name}": adam.moments for name, adam in self._adam.items()}
        steps = {name: adam.steps for name, adam in self._adam.items()}
        save_file(arrays, directory / CHECKPOINT)
        (directory / "learner.json").write_text(json.dumps({"engine": "fake", "model": self._shape, "steps": steps}))

    def begin_save(self, directory: Path) -> Future[None]:
        """Saves at once: a table is written in no more time than a copy takes."""
        self.save(directory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def restore(self, directory: Path) -> None:
        try:
            arrays = load_file(directory / CHECKPOINT)
            saved = json.loads((directory / "learner.json").read_text())
            if saved["model"] != self._shape:
                raise ValueError("it is of another model")
            steps = saved["steps"]
            moments = {name: arrays[f"moments.{name}"] for name in self._adam}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"checkpoint {directory}: {error} (delete it to continue from an older one)") from error
        self._table, self._reference, self._values = arrays["table"], arrays["reference"], arrays["values"]
        for name, adam in self._adam.items():
            adam.moments, adam.steps = moments[name], steps[name]

    def close(self) -> None:
        self._peers.close()


def _teacher_of(config: Config, vocabulary: int) -> np.ndarray | None:
    """Reads the teacher's table [V, V]. Its directory has it, so no checkpoint does."""
    if not config.actor.distill.teacher:
        return None
    table = model.read(Path(config.actor.distill.teacher))
    if len(table) != vocabulary:
        raise UserError(
            f"actor.distill.teacher: its vocabulary has {len(table)} tokens, the policy's {vocabulary} (use one of that size)"
        )
    return table


def _last(batch: Batch) -> np.ndarray:
    """Returns the token before each token, [R, T].

    At the first token of a segment it is arbitrary; that one is never trained on.
    """
    return np.roll(batch.token_ids, 1, axis=1)


def _rows(batch: Batch, rows: np.ndarray) -> Batch:
    return batch.replace(**{name: array[rows] for name, array in vars(batch).items() if array is not None})


def _tokens(batch: Batch) -> TokenArrays:
    def wide(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x.astype(np.float64)

    return TokenArrays(
        loss_weight=wide(batch.loss_weight),
        mask=batch.loss_mask,
        advantage=wide(batch.advantage),
        behavior_logp=wide(batch.behavior_logp),
        segment_ids=batch.segment_ids,
        proximal_logp=wide(batch.proximal_logp),
        reference_logp=wide(batch.reference_logp),
        teacher_logp=wide(batch.teacher_logp),
        interpolation=wide(batch.interpolation),
        versions=batch.versions,
    )


def _mean(x: np.ndarray, mask: np.ndarray) -> Mean:
    return Mean(float(x[mask].sum()), int(mask.sum()))
