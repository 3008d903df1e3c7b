"""What the sampler runs on devices: three compiled programs over one key/value cache, and the weights they read.

    prefill  tokens of some rows into the cache
    copy     rows of the cache onto other rows
    decode   up to `decode_steps` tokens of every active slot

Each is compiled at warm-up for every length in `spans`, and reads the cache only up to it. Whatever differs between
requests goes in as arrays, so that nothing compiles after warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rljax.backends.jax import hf
from rljax.backends.jax.mesh import dispatching
from rljax.backends.jax.model import KVCache
from rljax.backends.jax.sampling import Sampling, sample
from rljax.backends.jax.sharding import activation_sharding, constrain, replicated, shardings
from rljax.engine import WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.jax.slots import Chunk
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

SHORTEST_SPAN = 128  # tokens; below it attention costs little beside the matrices
LONE_CHUNK = 32  # tokens in a prefill dispatch of one short prompt
NARROW_CHUNK = 16  # tokens a row in a prefill dispatch of many prompts
MAX_STOP_IDS = 16  # a request
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


class State(NamedTuple):
    """Of B slots."""

    token: Array  # [B] int32, the next step takes it in
    position: Array  # [B] int32, of that token
    active: Array  # [B] bool
    limit: Array  # [B] int32, tokens of the completion
    sampling: Sampling


class Decoded(NamedTuple):
    """What a decode dispatch drew; -1 where a slot drew nothing. A slot's tokens stand in its first steps."""

    tokens: Array  # [steps, B] int32
    logp: Array  # [steps, B] float32, nats


class Programs:
    """Weights, cache and slot state on the devices of a mesh, and the compiled programs over them."""

    def __init__(
        self,
        model_dir: Path,
        mesh: Mesh,
        *,
        slots: int,
        context: int,
        prefill_tokens: int,
        decode_steps: int,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        cache_dtype: DTypeLike,
        precise: bool = False,
    ) -> None:
        """`dtype` is computed in; matrices are stored in `param_dtype`, norms in float32."""
        self.spec = ModelSpec.from_directory(model_dir)
        self.slots, self.context, self.decode_steps = slots, context, decode_steps
        self.spans = spans(context)
        self.shapes = chunk_shapes(prefill_tokens, slots, context)
        self.mesh, self._dtype, self._param_dtype = mesh, jnp.dtype(dtype), jnp.dtype(param_dtype)
        self._graphdef, params = hf.load(model_dir, mesh, self._dtype, self._param_dtype, precise=precise)
        self._shardings = shardings(self.spec, mesh)
        self.params = self._adopt(params)
        whole = jax.eval_shape(lambda: (KVCache.zeros(self.spec, slots, context, cache_dtype), empty_state(slots)))
        placed = jax.tree.map(self._sharding, whole)
        self._empty = jax.jit(lambda: KVCache.zeros(self.spec, slots, context, cache_dtype), out_shardings=placed[0])
        self._cache, self._state = self._empty(), jax.jit(lambda: empty_state(slots), out_shardings=placed[1])()
        compile_ = functools.partial(jax.jit, static_argnames="span")
        self._prefill = compile_(self._prefill_rows, donate_argnums=1, out_shardings=placed[0])
        self._copy = compile_(self._copy_rows, donate_argnums=0, out_shardings=placed[0])
        self._decode = compile_(self._decode_steps, donate_argnums=(1, 2), out_shardings=(*placed, replicated(mesh)))

    def warm_up(self) -> None:
        """Compiles every program by running it on nothing."""
        for span in self.spans:
            self.decode(np.zeros(self.slots, ORDER), span)
            self.copy([], span)
            for rows, width in self.shapes:
                out = np.full(rows, self.slots, np.int32)
                if width <= span:
                    self.prefill(Chunk(out, np.zeros_like(out), np.zeros_like(out), np.zeros((rows, width), np.int32)), span)
        self.wait()

    @property
    def compilations(self) -> int:
        """Programs compiled so far, by these three functions."""
        programs: tuple[Any, ...] = (self._prefill, self._copy, self._decode)
        return sum(program._cache_size() for program in programs)

    def span(self, length: int) -> int:
        """The shortest compiled span of at least so many tokens."""
        return next(span for span in self.spans if span >= min(length, self.context))

    def prefill(self, chunk: Chunk, span: int | None = None) -> None:
        plan = np.concatenate([np.stack([chunk.rows, chunk.starts, chunk.counts], axis=1), chunk.tokens], axis=1)
        span = self.span(max(chunk.end, chunk.tokens.shape[1])) if span is None else span
        with dispatching(self.mesh):
            self._cache = self._prefill(self.params, self._cache, plan, span=span)

    def copy(self, pairs: Sequence[tuple[int, int, int]], span: int | None = None) -> None:
        """(source row, target row, tokens), at most `copies` of them."""
        plan = np.full((self.copies, 2), self.slots, np.int32)
        for row, (source, target, _) in enumerate(pairs):
            plan[row] = source, target
        span = self.span(max(length for *_, length in pairs)) if span is None else span
        with dispatching(self.mesh):
            self._cache = self._copy(self._cache, plan, span=span)

    @property
    def copies(self) -> int:
        """Rows that one dispatch copies."""
        return min(self.slots, 16)

    def decode(self, orders: np.ndarray, span: int) -> Decoded:
        """Carries out the orders, [B] of ORDER, then draws up to `decode_steps` tokens of every active slot."""
        columns = orders.view(np.int32).reshape(self.slots, -1)
        with dispatching(self.mesh):
            self._cache, self._state, drawn = self._decode(self.params, self._cache, self._state, columns, span=span)
        return drawn

    def wait(self) -> None:
        """Returns when the devices have done everything asked of them."""
        jax.block_until_ready((self.params, self._cache, self._state))

    def free(self) -> None:
        """Drops weights, cache and state; nothing can be run after it."""
        del self.params, self._cache, self._state

    def lend(self) -> None:
        """Drops weights and cache; nothing can be run before `reclaim` and `load`. What the slots are at stays."""
        self.params = self._cache = None

    def reclaim(self) -> None:
        """A cache again, empty."""
        with dispatching(self.mesh):
            self._cache = self._empty()

    def load(self, source: WeightSource) -> None:
        """Takes other weights of the same model; on any error the old ones stay.

        Arrays are taken over where they are as the sampler wants them, and resharded and converted where they are not: the
        learner hands out buffers that it keeps no hold of.
        """
        match source:
            case WeightsInMemory(params):
                pass
            case WeightsInDirectory(directory):
                if ModelSpec.from_directory(directory) != self.spec:
                    raise UserError(f"{directory}: config.json describes another model than the one being sampled")
                params = hf.load(directory, self.mesh, self._dtype, self._param_dtype)[1]
            case _:
                raise UserError("the engine jax takes weights from memory or from a directory")
        adopted = self._adopt(params)
        jax.block_until_ready(adopted)
        self.params = adopted

    def _adopt(self, params: Any) -> Any:
        """The weights in the sampler's dtypes and shardings."""
        wanted: Any = jax.tree.structure(self._shardings)
        if wanted != jax.tree.structure(params):
            raise UserError("weights: not the parameters of the model being sampled (LoRA factors must be merged first)")

        def place(path: Any, leaf: Any, sharding: Any) -> Array:
            dtype = jnp.float32 if path[-1].key == "scale" else self._param_dtype
            return jax.device_put(leaf if leaf.dtype == dtype else leaf.astype(dtype), sharding)

        with dispatching(self.mesh):
            return jax.tree.map_with_path(place, params, self._shardings)

    def _sharding(self, leaf: jax.ShapeDtypeStruct) -> Any:
        kind = "cache" if leaf.ndim == 5 else "slots"
        return activation_sharding(self.mesh, kind, leaf.shape) if kind == "cache" else replicated(self.mesh)

    def _prefill_rows(self, params: Any, cache: KVCache, plan: Array, *, span: int) -> KVCache:
        """plan [R, 3 + C]: row, position of the first token, number of tokens, tokens. Rows out of range do nothing."""
        rows, starts, counts, tokens = plan[:, 0], plan[:, 1], plan[:, 2], plan[:, 3:]
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            offsets = jnp.arange(tokens.shape[1])[None]
            positions = jnp.where(offsets < counts[:, None], starts[:, None] + offsets, span)
            window = jax.tree.map(lambda x: constrain(x.at[:, rows, :span].get(mode="clip"), "cache"), cache)
            window = nnx.merge(self._graphdef, params)(tokens, positions, cache=window)[1]
            return jax.tree.map(lambda x, new: x.at[:, rows, :span].set(new, mode="drop"), cache, window)

    def _copy_rows(self, cache: KVCache, plan: Array, *, span: int) -> KVCache:
        """plan [R, 2]: source and target row; a target out of range does nothing."""

        def copied(x: Array) -> Array:
            return x.at[:, plan[:, 1], :span].set(x.at[:, plan[:, 0], :span].get(mode="clip"), mode="drop")

        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.tree.map(copied, cache)

    def _decode_steps(
        self, params: Any, cache: KVCache, state: State, orders: Array, *, span: int
    ) -> tuple[KVCache, State, Decoded]:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            model = nnx.merge(self._graphdef, params)
            none = Decoded(
                jnp.full((self.decode_steps, self.slots), -1, jnp.int32),
                jnp.zeros((self.decode_steps, self.slots), jnp.float32),
            )

            def going(carry: tuple[Array, KVCache, State, Decoded]) -> Array:
                step, _, state, _ = carry
                return (step < self.decode_steps) & jnp.any(state.active)

            def one_step(carry: tuple[Array, KVCache, State, Decoded]) -> tuple[Array, KVCache, State, Decoded]:
                step, cache, state, drawn = carry
                positions = jnp.where(state.active, state.position, self.context)  # out of range: nothing is written
                hidden, cache = model(state.token[:, None], positions[:, None], cache=cache, cache_length=span)
                token, logp = sample(constrain(model.logits(hidden[:, 0]), "rows"), state.sampling)
                drawn = Decoded(drawn.tokens.at[step].set(jnp.where(state.active, token, -1)), drawn.logp.at[step].set(logp))
                return step + 1, cache, advance(state, token), drawn

            start = (jnp.int32(0), cache, obey(state, orders), none)
            return jax.lax.while_loop(going, one_step, start)[1:]  # ends early when every slot has


def spans(context: int) -> list[int]:
    """Powers of two from SHORTEST_SPAN, and the context itself."""
    lengths = []
    length = SHORTEST_SPAN
    while length < context:
        lengths.append(length)
        length *= 2
    return [*lengths, context]


def chunk_shapes(tokens: int, slots: int, context: int) -> list[tuple[int, int]]:
    """(rows, tokens a row) of the prefill programs: a lone short prompt, many short ones at once, a chunk of a long one."""
    tokens = min(tokens, slots * context)
    lone, narrow, wide = (min(width, tokens, context) for width in (LONE_CHUNK, NARROW_CHUNK, tokens))
    shapes = {(1, lone)} | {(max(1, min(slots, tokens // width)), width) for width in (narrow, wide)}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def empty_state(slots: int) -> State:
    """Nobody in any slot."""
    ints, floats = jnp.zeros(slots, jnp.int32), jnp.ones(slots, jnp.float32)
    none = jnp.zeros(slots, bool)
    stop_ids = jnp.zeros((slots, MAX_STOP_IDS), jnp.int32)
    sampling = Sampling(floats, floats, ints, none, ints, stop_ids, ints.astype(jnp.uint32), ints)
    return State(ints, ints, none, ints, sampling)


def obey(state: State, orders: Array) -> State:
    """The state after the orders, the columns of ORDER as int32 [B, columns]."""

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
    fresh = State(column("token"), column("position"), starts, column("limit"), sampling)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(starts.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    state = jax.tree.map(chosen, fresh, state)
    return state._replace(active=state.active & (column("action") != HALT))


def advance(state: State, token: Array) -> State:
    """The state after every active slot drew its token: one further, and at rest where that token was the last."""
    sampling = state.sampling
    emitted = sampling.token_index + 1
    stopped = jnp.any(token[:, None] == sampling.stop_ids, axis=-1) | (emitted >= state.limit)
    return State(
        token=jnp.where(state.active, token, state.token),
        position=jnp.where(state.active, state.position + 1, state.position),
        active=state.active & ~stopped,
        limit=state.limit,
        sampling=sampling._replace(token_index=jnp.where(state.active, emitted, sampling.token_index)),
    )
