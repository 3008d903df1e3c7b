"""The oracle of experiments.parity: transformers' model in float64, and our definitions in numpy.

The model's forward and backward passes are transformers' and torch's; head, objective and their
gradients are `rljax/objective`, derived by hand. Each trajectory goes alone, without packing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rljax.experiments.certificate.case import ADAPTER, HEAD, Case, Result, Tensors, Update, Vector
from rljax.hf.spec import ModelSpec
from rljax.objective import losses
from rljax.objective.logprobs import token_logprobs, token_logprobs_grad
from rljax.objective.oracle import policy_objective
from rljax.objective.spec import TokenArrays
from rljax.types import Trajectory


class Oracle:
    """The right results for a case.

    Example: oracle = Oracle(case); case = with_policies_near(case, oracle.logp()); oracle.run(case)
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64) -> None:
        """
        Args:
          dtype: of the model. Another than float64 shows what rounding does (bounds.py).
        """
        self._case = case
        self._spec = ModelSpec.from_directory(case.model_dir)
        self._model = load(case, dtype)
        self._initial = {name: p.detach().double() for name, p in load(case).named_parameters()}
        self._summed: Tensors = {}  # gradients so far

    def in_dtype_of_case(self) -> Oracle:
        """Returns the same model in the dtype of the engines' arithmetic."""
        return Oracle(self._case, getattr(torch, self._case.config.actor.dtype))

    def logp(self) -> Vector:
        """Log-probs of the trained tokens under the policy."""
        self._fill("params")
        return self._scores(self._case)

    def sequence_logp(self, token_ids: np.ndarray, start: int) -> Vector:
        """Log-probs under the policy of a sequence's tokens from `start` on."""
        self._fill("params")
        targets = np.arange(start, len(token_ids))
        hidden = self._hidden(token_ids)[targets - 1]
        return self._head(hidden, token_ids[targets], self._case.config.gconfig.temperature)[0]

    def run(self, case: Case) -> Result:
        """Computes everything that a learner is asked for."""
        values = critic = reference = None
        if case.config.actor.kl_ctl > 0:
            self._fill(None)
            reference = self._scores(case)
        if case.config.actor.adv_estimator == "gae":
            values, critic = self._critic(case)
        return Result(self.logp(), self._policy(case), reference, values, critic)

    def _scores(self, case: Case) -> Vector:
        return np.concatenate([self._token_scores(t, case.config.gconfig.temperature)[2] for t in case.trajectories])

    def _policy(self, case: Case) -> Update:
        self._fill("params")
        loss, entropies, slopes = 0.0, [], []
        unembedding = next(n for n, p in self._model.named_parameters() if p is self._unembedding())
        for index, trajectory in enumerate(case.trajectories):
            hidden, labels, logp, entropy = self._token_scores(trajectory, case.update_temperature)
            term = policy_objective(logp[None], entropy[None], _tokens(case, index), case.objective)
            d_hidden, d_unembedding, *_ = token_logprobs_grad(
                _array(hidden),
                _array(self._unembedding()),
                labels,
                term.d_logp[0],
                term.d_entropy[0],
                temperature=case.update_temperature,
                softcap=self._spec.final_softcap,
            )
            self._backward(hidden, d_hidden)
            self._add_gradient(unembedding, d_unembedding)
            loss += term.loss
            entropies.append(entropy)
            slopes += [term.d_logp[0], term.d_entropy[0]]
        mean_entropy = None if case.objective.loss == "sft" else float(np.concatenate(entropies).mean())
        return Update(loss, self._gradients("params"), mean_entropy, slope=float(np.linalg.norm(np.concatenate(slopes))))

    def _critic(self, case: Case) -> tuple[Vector, Update]:
        """Computes the critic's values and its gradient."""
        self._fill("critic/params")
        head = case.weights("critic/params", HEAD, np.zeros(self._spec.hidden_size, np.float32)).astype(np.float64)
        loss, found, slopes, d_head = 0.0, [], [], np.zeros_like(head)
        for index, trajectory in enumerate(case.trajectories):
            mask = trajectory.loss_mask
            hidden = self._hidden(trajectory.token_ids)[np.flatnonzero(mask) - 1]
            values = _array(hidden) @ head
            given = [case.arrays[name][index][mask].astype(np.float64) for name in ("values", "returns", "loss_weight")]
            term = losses.value_loss(
                values, given[0], given[1], np.ones(len(values), bool), given[2], clip=case.config.critic.eps_clip_value
            )
            slope = term.grads["values"]
            self._backward(hidden, np.outer(slope, head))
            d_head += _array(hidden).T @ slope
            loss += term.sum
            found.append(values)
            slopes.append(slope)
        gradients = self._gradients("critic/params") | {HEAD: d_head}
        return np.concatenate(found), Update(loss, gradients, slope=float(np.linalg.norm(np.concatenate(slopes))))

    # The model

    def _backward(self, hidden: Tensor, slope: np.ndarray) -> None:
        """Sums the gradients of a trajectory in float64, whatever the model's dtype."""
        hidden.backward(torch.from_numpy(slope).to(hidden.dtype))
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._add_gradient(name, _array(parameter.grad))
                parameter.grad = None

    def _add_gradient(self, name: str, gradient: np.ndarray) -> None:
        self._summed[name] = self._summed[name] + gradient if name in self._summed else gradient

    def _fill(self, part: str | None) -> None:
        """Gives the model the weights of a part of the learner's state; None: those it began with."""
        case, lora = self._case, self._case.config.actor.lora
        self._summed = {}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                initial = self._initial[name]
                parameter.copy_(initial)
                if part and name in self._adapted():
                    a, b = self._factors(part, name)
                    parameter.copy_(initial + lora.alpha / lora.rank * torch.from_numpy(b @ a))
                elif part and not lora.rank:
                    parameter.copy_(torch.from_numpy(case.weights(part, name, initial.float().numpy())))

    def _gradients(self, part: str) -> Tensors:
        found = self._summed
        lora = self._case.config.actor.lora
        if not lora.rank:
            return found
        adapters = {}
        for name in self._adapted():
            (a, b), stem, scale = self._factors(part, name), name.removesuffix("weight"), lora.alpha / lora.rank
            adapters[f"{stem}lora_A.weight"] = scale * b.T @ found[name]
            adapters[f"{stem}lora_B.weight"] = scale * found[name] @ a.T
        return adapters

    def _adapted(self) -> list[str]:
        """Names of the tensors that have adapters."""
        lora = self._case.config.actor.lora
        names = [name for name in self._initial if name.endswith(".weight") and name.split(".")[-2] in lora.target_modules]
        return names if lora.rank else []

    def _factors(self, part: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Factors A [rank, inputs] and B [outputs, rank] of a tensor's adapter, float64."""
        outputs, inputs = self._initial[name].shape
        rank, stem = self._case.config.actor.lora.rank, name.removesuffix(".weight")
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        a, b = (
            self._case.weights(part, f"{stem}{ADAPTER}{factor}.weight", np.zeros(shape, np.float32)).astype(np.float64)
            for factor, shape in shapes.items()
        )
        return a, b

    def _token_scores(self, trajectory: Trajectory, temperature: float) -> tuple[Tensor, np.ndarray, Vector, Vector]:
        """Returns hidden states, labels, log-probs and entropies of the trained tokens."""
        targets = np.flatnonzero(trajectory.loss_mask)
        hidden, labels = self._hidden(trajectory.token_ids)[targets - 1], trajectory.token_ids[targets]
        return hidden, labels, *self._head(hidden, labels, temperature)

    def _head(self, hidden: Tensor, labels: np.ndarray, temperature: float) -> tuple[Vector, Vector]:
        unembedding = _array(self._unembedding())
        return token_logprobs(_array(hidden), unembedding, labels, temperature=temperature, softcap=self._spec.final_softcap)

    def _hidden(self, token_ids: np.ndarray) -> Tensor:
        """Final hidden states, [T, H]."""
        states: Tensor = self._model.model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None]).last_hidden_state
        return states[0]

    def _unembedding(self) -> Tensor:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight


def _tokens(case: Case, index: int) -> TokenArrays:
    """The trained tokens of one trajectory, as a row of their own in float64."""
    trajectory = case.trajectories[index]
    mask = trajectory.loss_mask
    given = {name: arrays[index][mask][None].astype(np.float64) for name, arrays in case.arrays.items()}
    ones = np.ones((1, int(mask.sum())), np.int32)
    return TokenArrays(
        mask=ones > 0,
        segment_ids=ones,
        behavior_logp=trajectory.behavior_logp[mask][None].astype(np.float64),
        **{name: array for name, array in given.items() if name in TokenArrays._fields},
    )


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().double().numpy()
    return array


def load(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    """Loads transformers' model, without its progress bar."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=dtype, attn_implementation="eager")
    finally:
        if bars:
            logging.enable_progress_bar()
    # transformers gives the padding id's embedding no gradient, but in a packed row it is an ordinary token (it may be EOS)
    embeddings: Any = model.get_input_embeddings()
    embeddings.padding_idx = None
    return model
