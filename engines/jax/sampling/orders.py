"""Decoding state of the slots, and the orders by which the scheduler changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax.sampling import Sampling

MAX_STOP_IDS = 16  # per request
KEEP, START, HALT = range(3)  # what an order does to a slot

ORDER = np.dtype(
    [
        ("action", np.int32),
        ("token", np.int32),  # the last of the prompt (and of the completion so far): the next step takes it in
        ("position", np.int32),  # of that token
        ("limit", np.int32),  # tokens of the completion
        ("token_index", np.int32),  # of the next token in the completion
        ("seed", np.int32),  # the bits of a uint32
        ("min_new_tokens", np.int32),
        ("top_k", np.int32),
        ("greedy", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("stop_ids", np.int32, (MAX_STOP_IDS,)),
    ]
)
FIELDS: Mapping[str, Any] = ORDER.fields or {}


class DecodeState(NamedTuple):
    """Decoding state of B slots."""

    token: Array  # [B] int32, the next step takes it in
    position: Array  # [B] int32, of that token
    active: Array  # [B] bool
    limit: Array  # [B] int32, tokens of the completion
    sampling: Sampling


class Decoded(NamedTuple):
    """Tokens of a decode dispatch; -1 where a slot drew nothing.

    A slot's tokens stand in its first steps.
    """

    tokens: Array  # [steps, B] int32
    logp: Array  # [steps, B] float32, nats


def empty_state(slots: int) -> DecodeState:
    """Nobody in any slot."""
    ints, floats = jnp.zeros(slots, jnp.int32), jnp.ones(slots, jnp.float32)
    none = jnp.zeros(slots, bool)
    stop_ids = jnp.zeros((slots, MAX_STOP_IDS), jnp.int32)
    sampling = Sampling(floats, floats, ints, none, ints, stop_ids, ints.astype(jnp.uint32), ints)
    return DecodeState(ints, ints, none, ints, sampling)


def apply_orders(state: DecodeState, orders: Array) -> DecodeState:
    """Returns the state after the orders, the columns of ORDER as int32 [B, columns]."""

    def column(name: str) -> Array:
        dtype, offset = FIELDS[name][:2]
        start, width = offset // 4, dtype.itemsize // 4
        return orders[:, start : start + width] if dtype.shape else orders[:, start]

    def decimal(name: str) -> Array:
        return jax.lax.bitcast_convert_type(column(name), jnp.float32)

    sampling = Sampling(
        temperature=decimal("temperature"),
        top_p=decimal("top_p"),
        top_k=column("top_k"),
        greedy=column("greedy") != 0,
        min_new_tokens=column("min_new_tokens"),
        stop_ids=column("stop_ids"),
        seed=column("seed").astype(jnp.uint32),
        token_index=column("token_index"),
    )
    starts = column("action") == START
    fresh = DecodeState(column("token"), column("position"), starts, column("limit"), sampling)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(starts.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    state = jax.tree.map(chosen, fresh, state)
    return state._replace(active=state.active & (column("action") != HALT))


def advance(state: DecodeState, token: Array) -> DecodeState:
    """The state after every active slot drew its token: one further, and at rest where that token
    was the last.
    """
    sampling = state.sampling
    emitted = sampling.token_index + 1
    stopped = jnp.any(token[:, None] == sampling.stop_ids, axis=-1) | (emitted >= state.limit)
    return DecodeState(
        token=jnp.where(state.active, token, state.token),
        position=jnp.where(state.active, state.position + 1, state.position),
        active=state.active & ~stopped,
        limit=state.limit,
        sampling=sampling._replace(token_index=jnp.where(state.active, emitted, sampling.token_index)),
    )
