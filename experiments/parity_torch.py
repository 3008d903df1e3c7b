"""The torch side of experiments.parity: transformers' model, our arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rljax.backends.torch.logprobs import token_logprobs
from rljax.backends.torch.objective import policy_objective
from rljax.backends.torch.optim import Optimizer, TrainedParameter
from rljax.experiments.parity_case import Case
from rljax.hf.activations import logit_rows
from rljax.hf.spec import ModelSpec
from rljax.objective.spec import TokenArrays


def run(case: Case) -> dict[str, Any]:
    """Returns the fields of a Result."""
    model = _load(case, getattr(torch, case.dtype))
    spec = ModelSpec.from_directory(case.model_dir)
    hidden = model.model(input_ids=_tensor(case.token_ids), position_ids=_tensor(case.positions)).last_hidden_state
    source = _tensor(case.compacted.source)
    named = hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1]))
    labels = _tensor(case.compacted.labels)
    flat = token_logprobs(
        named.flatten(0, 1),
        model.get_output_embeddings().weight,
        labels.flatten(),
        temperature=case.config.gconfig.temperature,
        softcap=spec.final_softcap,
        chunk=logit_rows(case.config.actor.logprob_chunk, spec.vocab_size),
    )
    logp, entropy = (x.view(labels.shape) for x in flat)
    tokens = TokenArrays(*(x if x is None else _tensor(x) for x in case.compacted.tokens))
    loss, _ = policy_objective(logp, entropy, tokens, case.objective)
    loss.backward()
    master = getattr(torch, case.master)
    parameters = {name: p.detach().to(master) for name, p in model.named_parameters()}
    gradients = {name: p.grad.to(master) for name, p in model.named_parameters() if p.grad is not None}
    return {
        "logp": logp.detach().double().numpy(),
        "entropy": entropy.detach().double().numpy(),
        "loss": loss.item(),
        "gradients": {name: gradient.numpy() for name, gradient in gradients.items()},
        "step": _optimized(case, parameters, gradients, [1.0]),
    }


def two_steps(case: Case) -> dict[str, np.ndarray]:
    """Returns the change of each tensor in two optimizer steps in float64.

    The gradients are those of `Case.gradient`.
    """
    model = _load(case, torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = {name: torch.from_numpy(case.gradient(name, tuple(p.shape))) for name, p in parameters.items()}
    return _optimized(case, parameters, gradients, case.factors)


def _optimized(
    case: Case, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], factors: Sequence[float]
) -> dict[str, np.ndarray]:
    """Returns the change of master weights in steps of the learner's optimizer.

    The gradient is multiplied by each factor in turn.
    """
    values = {name: parameter.clone() for name, parameter in parameters.items()}
    factor = 1.0

    def trained(name: str) -> TrainedParameter:
        return TrainedParameter(name, values[name], lambda: gradients[name] * factor if name in gradients else None)

    settings = case.config.actor.optimizer
    optimizer = Optimizer(
        settings, case.total_steps, "actor.optimizer", [trained(name) for name in values], lambda total: total
    )
    for factor in factors:  # noqa: B007 (read by the parameters)
        optimizer.step()
    return {name: (values[name] - parameters[name]).numpy() for name in gradients}


def _load(case: Case, dtype: torch.dtype) -> Any:
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


def _tensor(x: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    return tensor.long() if tensor.dtype == torch.int32 else tensor
