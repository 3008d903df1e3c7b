"""Compares a model's packed log-probs with those that transformers computes of each row alone.

Families differ in what their layers do with positions, masks and segments, and in what they do to
logits. A family that rljax does not know is tried at the start on a few tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch import model
from rljax.backends.torch.attention import IMPLEMENTATION, Segments
from rljax.backends.torch.mesh import RankMesh
from rljax.backends.torch.model import Network
from rljax.errors import UserError

TOKENS = 12  # of each of two segments
OWN_ATTENTION = "eager"  # transformers' reference, which every family has
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' deviation from their mean


@torch.no_grad()
def check(network: Network, directory: Path | str, rank_mesh: RankMesh, dtype: torch.dtype) -> None:
    """Refuses a model whose packed rows are not its rows alone. All ranks call it.

    Raises UserError, on all ranks.
    """
    kind = type(network.causal).__name__
    try:
        packed, alone = _logits(network, rank_mesh)
    except (TypeError, ValueError, AttributeError) as error:
        line = str(error).split("\n")[0]
        raise UserError(f"{directory}: {kind} takes no packed rows, and fsdp trains on them ({line})") from None
    finally:
        model.reshard(network)
    packed, alone = (x - x.mean(-1, keepdim=True) for x in (packed, alone))  # log-probs, but for a constant
    deviation = float(((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max())
    if not deviation <= ALLOWED[dtype]:  # NaN too
        raise UserError(
            f"{directory}: {kind} has other log-probs in packed rows than in each row alone (relative error {deviation:.2g}, "
            f"allowed {ALLOWED[dtype]:g}): attention, positions or logits of its own, with which fsdp would train wrongly"
        )


def _logits(network: Network, rank_mesh: RankMesh) -> tuple[Tensor, Tensor]:
    """Returns the logits of two segments packed into a row, and of each alone; [2, TOKENS, V]."""
    drawn = np.random.default_rng(0).integers(0, network.spec.vocab_size, (2, TOKENS))
    tokens = torch.from_numpy(drawn).to(rank_mesh.device)
    positions = torch.arange(TOKENS, device=rank_mesh.device).repeat(2)[None]
    segments = Segments.of(np.repeat([[1, 2]], TOKENS, axis=1).astype(np.int32), rank_mesh.device)

    def both(hidden: Tensor, unembedding: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ unembedding.T.to(hidden.dtype)).float().view(*tokens.shape, -1)
        if (cap := network.spec.final_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits, _alone(network, tokens)

    both_logits: tuple[Tensor, Tensor] = network(both, tokens.view(1, -1), positions, segments)
    return both_logits


def _alone(network: Network, tokens: Tensor) -> Tensor:
    causal = network.causal
    causal.set_attn_implementation(OWN_ATTENTION)
    try:
        rows = [causal(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens]
    finally:
        causal.set_attn_implementation(IMPLEMENTATION)
    return torch.stack(rows)
