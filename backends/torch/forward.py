"""Computes log-probs, objectives and values of target tokens from packed rows, on any rank mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rljax.backends.torch.fused import fused_objective
from rljax.backends.torch.logprobs import token_logprobs
from rljax.backends.torch.model import Network
from rljax.backends.torch.objective import policy_objective
from rljax.objective.spec import MeanArrays, Objective


def predicting_hidden(hidden: Tensor, rows: Any) -> Tensor:
    """Returns the hidden states that predict the target tokens: those of the tokens before them.

    [r, m, H]
    """
    return torch.take_along_dim(hidden, rows.source[..., None], dim=1)


def _pass(network: Network, rows: Any, function: Callable[[Tensor, Tensor], Any]) -> Any:
    """Returns function(hidden states that predict the target tokens, unembedding).

    With context parallelism only for the rows that this rank scores.
    """
    context = rows.segments.context

    def named(hidden: Tensor, unembedding: Tensor) -> Any:
        hidden = context.gather(hidden, 1)
        if context.size > 1:
            hidden = hidden.chunk(context.size)[context.rank]  # each rank scores its share of the whole rows
        return function(predicting_hidden(hidden, rows), unembedding)

    return network(named, rows.token_ids, rows.positions, rows.segments, rows.pictures)


def target_logprobs(network: Network, rows: Any, *, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns log-prob and entropy of the target tokens under logits / temperature.

    [r, m] float32, nats each. No [T, V] array is ever in memory.
    """
    return _pass(network, rows, functools.partial(_scores, network, rows, temperature, chunk))


def _scores(
    network: Network, rows: Any, temperature: float, chunk: int, hidden: Tensor, unembedding: Tensor
) -> tuple[Tensor, Tensor]:
    logp, entropy = token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        unembedding,
        rows.labels.reshape(-1),
        temperature=temperature,
        softcap=network.spec.final_softcap,
        chunk=chunk,
        group=network.vocabulary,
    )
    return logp.view(rows.labels.shape), entropy.view(rows.labels.shape)


def target_objective(
    network: Network, rows: Any, objective: Objective, *, temperature: float, chunk: int
) -> tuple[Tensor, dict[str, MeanArrays]]:
    """Computes loss and metrics of the target tokens by `policy_objective`.

    It is fused with the unembedding if the objective allows that.
    """

    def whole(hidden: Tensor, unembedding: Tensor) -> tuple[Tensor, dict[str, MeanArrays]]:
        logp, entropy = _scores(network, rows, temperature, chunk, hidden, unembedding)
        return policy_objective(logp, entropy, rows.tokens, objective)

    def fused(hidden: Tensor, unembedding: Tensor) -> tuple[Tensor, dict[str, MeanArrays]]:
        return fused_objective(
            hidden.reshape(-1, hidden.shape[-1]),
            unembedding,
            rows.labels.reshape(-1),
            rows.tokens,
            objective,
            temperature=temperature,
            softcap=network.spec.final_softcap,
            chunk=chunk,
            accumulator=torch.float32,  # a sum of many chunks
            group=network.vocabulary,
            with_advantage=rows.with_advantage,
        )

    return _pass(network, rows, fused if objective.by_token else whole)


def target_values(network: Network, head: Tensor, rows: Any) -> Tensor:
    """Returns the critic's values of the context before each target token.

    [r, m] float32, reward units.
    """
    return _pass(network, rows, lambda hidden, _: hidden.float() @ head)
