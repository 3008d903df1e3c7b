"""Programs of the sampler: three compiled functions over one key/value cache, and the weights they
read.

    prefill  tokens of some rows into the cache
    copy     rows of the cache onto other rows
    decode   up to `decode_steps` tokens of every active slot

All of them update the cache where it is (tested in the compiled programs). Prefill is compiled for
every one of `shapes`, copy for every length in `spans`, decode once. Whatever differs between
requests goes in as arrays, so that nothing compiles after warm-up.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rljax.backends.jax import hf
from rljax.backends.jax.cached import LAYERS, Cache, CachedTransformer, empty_cache, stack, unstack
from rljax.backends.jax.decode_attention import Problem, choose, spans
from rljax.backends.jax.mesh import dispatching, row_shards
from rljax.backends.jax.sampling import Sampling, sample
from rljax.backends.jax.sharding import activation_sharding, constrain, replicated, shardings
from rljax.config.schema import Config
from rljax.engine import WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.slots import Chunk
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

LONE_CHUNK = 32  # tokens in a prefill dispatch of one short prompt
NARROW_CHUNK = 16  # tokens per row in a prefill dispatch of many prompts
MIDDLE_CHUNK = 128  # tokens per row in a prefill dispatch of a few prompts
OUTSIDE = -1  # a position that is in no row: of padding, and of slots at rest
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
        decode_attention: str = "auto",
        described: bool = False,
    ) -> None:
        """Compiles nothing yet.

        Args:
          dtype: computed in. Matrices are stored in `param_dtype`, norms in float32.
          described: weights, cache and state are shapes alone: for `lower`, on devices that are not
            there.

        Raises:
          UserError: a model that can't be loaded, or a `decode_attention` that can't do this.
        """
        self.spec = ModelSpec.from_directory(model_dir)
        self.slots, self.context, self.decode_steps = slots, context, decode_steps
        self.spans = spans(context)
        self.shapes = chunk_shapes(prefill_tokens, slots, context)
        self.mesh, self._dtype, self._param_dtype = mesh, jnp.dtype(dtype), jnp.dtype(param_dtype)
        self.attention = choose(decode_attention, self._problem(jnp.dtype(cache_dtype)))
        self._graphdef, params = hf.load(model_dir, mesh, self._dtype, self._param_dtype, precise=precise, describe=described)
        self._shardings = shardings(self.spec, mesh)
        self._unstack = jax.jit(unstack, out_shardings=_unstacked(self._shardings, self.spec.num_layers))
        self._stack = jax.jit(stack, out_shardings=self._shardings)
        self.dispatches: collections.Counter[str] = collections.Counter()  # by kind

        def zeros() -> Cache:
            return empty_cache(self.spec, slots, self.attention.padded(context), cache_dtype)

        whole = jax.eval_shape(lambda: (zeros(), empty_state(slots)))
        placed = jax.tree.map(self._sharding, whole)
        self._empty = jax.jit(zeros, out_shardings=placed[0])
        self._prefill = jax.jit(self._prefill_rows, donate_argnums=1, out_shardings=placed[0])
        self._copy = jax.jit(self._copy_rows, static_argnames="span", donate_argnums=0, out_shardings=placed[0])
        self._decode = jax.jit(self._decode_steps, donate_argnums=(1, 2), out_shardings=(*placed, replicated(mesh)))
        if described:
            self._weights = self._described(params)
            self._cache, self._state = jax.tree.map(_shape, whole, placed)
        else:
            self._weights = self._adopt(params)
            self._cache, self._state = self._empty(), jax.jit(lambda: empty_state(slots), out_shardings=placed[1])()

    @classmethod
    def of(cls, config: Config, model_dir: Path, mesh: Mesh, *, described: bool = False) -> Programs:
        """The programs of a run. Raises UserError as the constructor does, and for slots that the
        data shards of the mesh do not divide.
        """
        settings = JaxConfig.of(config)
        if settings.slots % row_shards(mesh):
            raise UserError(f"jax.slots: {settings.slots} is not a multiple of the {row_shards(mesh)} data shards of its pool")
        return cls(
            model_dir,
            mesh,
            slots=settings.slots,
            context=settings.context_length,
            prefill_tokens=settings.prefill_chunk,
            decode_steps=settings.decode_steps,
            dtype=config.actor.dtype if settings.bitwise else settings.sampler_dtype,
            param_dtype="float32" if settings.bitwise else settings.sampler_dtype,
            cache_dtype=settings.cache_dtype,
            precise=settings.precise,
            decode_attention=settings.decode_attention,
            described=described,
        )

    def _problem(self, cache_dtype: jnp.dtype) -> Problem:
        spec, mesh = self.spec, self.mesh
        return Problem(
            platform=mesh.devices.flat[0].platform,
            dtype=self._dtype,
            cache_dtype=cache_dtype,
            rows=self.slots,
            length=self.context,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            softcap=spec.attention_softcap,
            row_shards=row_shards(mesh),
            head_shards=mesh.shape["tensor"],
        )

    def warm_up(self) -> None:
        """Compiles every program by running it on nothing."""
        self.decode(np.zeros(self.slots, ORDER))
        for span in self.spans:
            self.copy([], span)
        for rows, width in self.shapes:
            out = np.full(rows, self.slots, np.int32)
            self.prefill(Chunk(out, np.zeros_like(out), np.zeros_like(out), np.zeros((rows, width), np.int32)))
        self.wait()

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Lowers every program for the shapes that it is called with, and returns them by name."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.mesh))

        weights, cache = self._weights, self._cache
        columns = ints(self.slots, ORDER.itemsize // 4)
        lowered = {"decode": self._decode.lower(weights, cache, self._state, columns)}
        for span in self.spans:
            lowered[f"copy {span}"] = self._copy.lower(cache, ints(self.copies, 2), span=span)
        for rows, width in self.shapes:
            lowered[f"prefill {rows}x{width}"] = self._prefill.lower(weights, cache, ints(rows, 3 + width))
        return lowered

    @property
    def compilations(self) -> int:
        """Programs compiled so far, by these three functions."""
        programs: tuple[Any, ...] = (self._prefill, self._copy, self._decode)
        return sum(program._cache_size() for program in programs)

    @property
    def params(self) -> Any:
        """The weights as `hf.load` gives them, made anew by every call."""
        with dispatching(self.mesh):
            return self._stack(self._weights)

    def prefill(self, chunk: Chunk) -> None:
        plan = np.concatenate([np.stack([chunk.rows, chunk.starts, chunk.counts], axis=1), chunk.tokens], axis=1)
        self.dispatches["prefill {}x{}".format(*chunk.tokens.shape)] += 1
        with dispatching(self.mesh):
            self._cache = self._prefill(self._weights, self._cache, plan)

    def copy(self, pairs: Sequence[tuple[int, int, int]], span: int | None = None) -> None:
        """(source row, target row, tokens), at most `copies` of them, up to `span` tokens; None:
        the shortest that does.
        """
        plan = np.full((self.copies, 2), self.slots, np.int32)
        for row, (source, target, _) in enumerate(pairs):
            plan[row] = source, target
        longest = max((length for *_, length in pairs), default=0)
        span = next(span for span in self.spans if span >= longest) if span is None else span
        self.dispatches["copy"] += 1
        with dispatching(self.mesh):
            self._cache = self._copy(self._cache, plan, span=span)

    @property
    def copies(self) -> int:
        """Rows that one dispatch copies."""
        return min(self.slots, 16)

    def decode(self, orders: np.ndarray) -> Decoded:
        """Carries out the orders, [B] of ORDER, then draws up to `decode_steps` tokens of every
        active slot.
        """
        columns = orders.view(np.int32).reshape(self.slots, -1)
        self.dispatches["decode"] += 1
        with dispatching(self.mesh):
            self._cache, self._state, drawn = self._decode(self._weights, self._cache, self._state, columns)
        return drawn

    def wait(self) -> None:
        """Returns when the devices have done everything asked of them."""
        jax.block_until_ready((self._weights, self._cache, self._state))

    def free(self) -> None:
        """Drops weights, cache and state; nothing can be run after it."""
        del self._weights, self._cache, self._state

    def lend(self) -> None:
        """Drops weights and cache; nothing can be run before `reclaim` and `load`.

        What the slots are at stays.
        """
        self._weights = self._cache = None

    def reclaim(self) -> None:
        """A cache again, empty."""
        with dispatching(self.mesh):
            self._cache = self._empty()

    def load(self, source: WeightSource) -> None:
        """Takes other weights of the same model; on any error the old ones stay.

        Arrays are taken over where they are as the sampler wants them, and resharded and converted
        where they are not: the learner hands out buffers that it keeps no hold of.
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
        self._weights = adopted

    def _adopt(self, params: Any) -> Any:
        """The weights in the sampler's dtypes and shardings, layer by layer."""
        wanted: Any = jax.tree.structure(self._shardings)
        if wanted != jax.tree.structure(params):
            raise UserError("weights: not the parameters of the model being sampled (LoRA factors must be merged first)")

        def place(path: Any, leaf: Any, sharding: Any) -> Array:
            dtype = self._stored(path)
            return jax.device_put(leaf if leaf.dtype == dtype else leaf.astype(dtype), sharding)

        with dispatching(self.mesh):
            return self._unstack(jax.tree.map_with_path(place, params, self._shardings))

    def _described(self, params: Any) -> Any:
        """Shapes of `_adopt`."""
        stored = jax.tree.map_with_path(lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, self._stored(path)), params)
        return jax.tree.map(_shape, jax.eval_shape(unstack, stored), _unstacked(self._shardings, self.spec.num_layers))

    def _stored(self, path: Any) -> Any:
        """Dtype of the weight at a path of the tree."""
        return jnp.float32 if path[-1].key == "scale" else self._param_dtype

    def _sharding(self, leaf: jax.ShapeDtypeStruct) -> Any:
        return activation_sharding(self.mesh, "cache", leaf.shape) if leaf.ndim == 4 else replicated(self.mesh)

    def _prefill_rows(self, weights: Any, cache: Cache, plan: Array) -> Cache:
        """plan [R, 3 + C]: row, position of the first token, number of tokens, tokens.

        Rows out of range do nothing.
        """
        rows, starts, counts, tokens = plan[:, 0], plan[:, 1], plan[:, 2], plan[:, 3:]
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            offsets = jnp.arange(tokens.shape[1])[None]
            positions = jnp.where(offsets < counts[:, None], starts[:, None] + offsets, OUTSIDE)
            model = CachedTransformer(self._graphdef, weights)
            return model.extend(tokens, positions, cache, rows, attend=self.attention.attend)[1]

    def _copy_rows(self, cache: Cache, plan: Array, *, span: int) -> Cache:
        """plan [R, 2]: source and target row; a target out of range does nothing."""

        def copied(x: Array) -> Array:
            return x.at[plan[:, 1], :, :span].set(x.at[plan[:, 0], :, :span].get(mode="clip"), mode="drop")

        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.tree.map(copied, cache)

    def _decode_steps(
        self, weights: Any, cache: Cache, state: DecodeState, orders: Array
    ) -> tuple[Cache, DecodeState, Decoded]:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            model = CachedTransformer(self._graphdef, weights)
            none = Decoded(
                jnp.full((self.decode_steps, self.slots), -1, jnp.int32),
                jnp.zeros((self.decode_steps, self.slots), jnp.float32),
            )

            def going(carry: tuple[Array, Cache, DecodeState, Decoded]) -> Array:
                step, _, state, _ = carry
                return (step < self.decode_steps) & jnp.any(state.active)

            def one_step(carry: tuple[Array, Cache, DecodeState, Decoded]) -> tuple[Array, Cache, DecodeState, Decoded]:
                step, cache, state, drawn = carry
                positions = jnp.where(state.active, state.position, OUTSIDE)
                hidden, cache = model.decode(state.token, positions, cache, attend=self.attention.attend)
                token, logp = sample(constrain(model.logits(hidden), "rows"), state.sampling)
                drawn = Decoded(drawn.tokens.at[step].set(jnp.where(state.active, token, -1)), drawn.logp.at[step].set(logp))
                return step + 1, cache, advance(state, token), drawn

            start = (jnp.int32(0), cache, apply_orders(state, orders), none)
            return jax.lax.while_loop(going, one_step, start)[1:]  # ends early when every slot has


def _shape(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _unstacked(stacked: dict[str, Any], layers: int) -> dict[str, Any]:
    """Shardings of `unstack`'s result."""
    of_layer = jax.tree.map(lambda s: NamedSharding(s.mesh, PartitionSpec(*s.spec[1:])), stacked[LAYERS])
    return stacked | {LAYERS: (of_layer,) * layers}


def chunk_shapes(tokens: int, slots: int, context: int) -> list[tuple[int, int]]:
    """(rows, tokens per row) of the prefill programs: a lone short prompt, many at once, a few, a
    chunk of a long one.
    """
    tokens = min(tokens, slots * context)
    lone, *several = (min(width, tokens, context) for width in (LONE_CHUNK, NARROW_CHUNK, MIDDLE_CHUNK, tokens))
    shapes = {(1, lone)} | {(max(1, min(slots, tokens // width)), width) for width in several}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


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
