"""The torch side of experiments.parity: transformers' model, our arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rljax.backends.torch.logprobs import token_logprobs
from rljax.backends.torch.objective import policy_objective
from rljax.hf.spec import ModelSpec
from rljax.objective import TokenArrays

if TYPE_CHECKING:
    from experiments.parity import Case


def run(case: Case) -> tuple[np.ndarray, np.ndarray, float, dict[str, np.ndarray]]:
    """Log-probs, entropies, loss, and gradients by tensor name."""
    model = AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=getattr(torch, case.dtype), attn_implementation="eager")
    # transformers gives the padding id's embedding no gradient; in a packed row it is a token like others (it may be EOS)
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010 (typed as a Module)
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
        chunk=case.config.actor.logprob_chunk,
    )
    logp, entropy = (x.view(labels.shape) for x in flat)
    tokens = TokenArrays(*(x if x is None else _tensor(x) for x in case.compacted.tokens))
    loss, _ = policy_objective(logp, entropy, tokens, case.objective)
    loss.backward()
    gradients = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    return logp.detach().double().numpy(), entropy.detach().double().numpy(), loss.item(), gradients


def _tensor(x: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    return tensor.long() if tensor.dtype == torch.int32 else tensor
