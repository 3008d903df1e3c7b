"""Programs of the sampler: three compiled functions over one paged key/value cache, and the weights
they read.

    prefill  tokens of some rows into their pages
    copy     pages onto other pages
    decode   up to `decode_steps` tokens of every active slot

All of them update the cache where it is (tested in the compiled programs). Prefill is compiled for
every one of `shapes`, copy once, decode for every one of `variants`. Whatever else differs between
requests, tables of pages included, goes in as arrays, so that nothing compiles after warm-up.

Where a device works beside the host, no program makes the host wait: a loop has a fixed number of
turns, and what depends on the requests is decided by the host, which chooses among the variants. A
condition that is computed on the device would be waited for at every step.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.backends.jax import hf
from rljax.backends.jax.cached import LAYERS, Cache, CachedTransformer, empty_cache, stack, unstack
from rljax.backends.jax.decode_attention import Groups, Places, Problem, choose, no_groups
from rljax.backends.jax.mesh import dispatching, row_shards
from rljax.backends.jax.sampling import sample
from rljax.backends.jax.sharding import BATCH, constrain, replicated, shardings
from rljax.config.schema import Config
from rljax.engine import WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.sampling.cache_size import pages_per_shard
from rljax.engines.jax.sampling.orders import ORDER, Decoded, DecodeState, advance, apply_orders, empty_state
from rljax.engines.jax.sampling.pages import columns
from rljax.engines.jax.sampling.slots import Chunk, Copy
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

LONE_CHUNK = 32  # tokens in a prefill dispatch of one short prompt
NARROW_CHUNK = 16  # tokens per row in a prefill dispatch of many prompts
MIDDLE_CHUNK = 128  # tokens per row in a prefill dispatch of a few prompts
COPIES = 64  # pages per dispatch and shard, at most
OUTSIDE = -1  # a position that is in no row: of padding, and of slots at rest


class Variant(NamedTuple):
    """Choices that a decode program is compiled for."""

    grouped: bool  # reads the pages that slots share once
    plain: bool | None  # every request asks for a temperature alone; None: the device looks

    @property
    def name(self) -> str:
        return " ".join(["decode", *["grouped"] * self.grouped, *["any"] * (self.plain is False)])


class Programs:
    """Weights, cache and slot state on the devices of a mesh, and the compiled programs over them."""

    def __init__(self, config: Config, model_dir: Path, mesh: Mesh, *, described: bool = False) -> None:
        """Compiles nothing yet.

        Args:
          described: weights, cache and state are shapes alone: for `lower`, on devices that are not
            there.

        Raises:
          UserError: a model that can't be loaded, a `jax.decode_attention` that can't do this,
            slots that the data shards of the mesh do not divide, or a cache without room for a
            request.
        """
        settings = JaxConfig.of(config)
        self.shards = row_shards(mesh)
        settings.check_slots(self.shards)
        self.spec = ModelSpec.from_directory(model_dir)
        self.slots, self.context, self.decode_steps = settings.slots, settings.context_length, settings.decode_steps
        self.shapes = chunk_shapes(settings.prefill_chunk, self.slots, self.context)
        self.mesh = mesh
        self._dtype = jnp.dtype(config.actor.dtype if settings.bitwise else settings.sampler_dtype)
        self._param_dtype = jnp.dtype("float32" if settings.bitwise else settings.sampler_dtype)
        self.attention = choose(settings.decode_attention, self._problem(settings))
        self.page_size = self.attention.page_size(settings.page_size, self.context)
        self.columns = columns(self.context, self.page_size)
        self._graphdef, params = hf.load(
            model_dir, mesh, self._dtype, self._param_dtype, precise=settings.precise, describe=described
        )
        self._shardings = shardings(self.spec, mesh)
        self._unstack = jax.jit(unstack, out_shardings=_unstacked(self._shardings, self.spec.num_layers))
        self._stack = jax.jit(stack, out_shardings=self._shardings)
        self._weights = self._described(params) if described else self._adopt(params)
        del params
        self.pages = pages_per_shard(settings, self.spec, mesh, self.attention, self.page_size, self._weights)
        self.dispatches: collections.Counter[str] = collections.Counter()  # by kind

        def zeros() -> Cache:
            return empty_cache(self.spec, self.pages * self.shards, self.page_size, settings.cache_dtype, self.attention)

        whole = jax.eval_shape(lambda: (zeros(), empty_state(self.slots)))
        placed: Any = jax.tree.map(self._cache_sharding, whole[0]), jax.tree.map(lambda _: replicated(mesh), whole[1])
        self._empty = jax.jit(zeros, out_shardings=placed[0])
        self._prefill = jax.jit(self._prefill_rows, donate_argnums=1, out_shardings=placed[0])
        self._copy = jax.jit(self._copy_pages, donate_argnums=0, out_shardings=placed[0])
        self._decode = jax.jit(
            self._decode_steps, static_argnums=5, donate_argnums=(1, 2), out_shardings=(*placed, replicated(mesh))
        )
        self._compiled: dict[str, jax.stages.Compiled] = {}
        if described:
            self._cache, self._state = jax.tree.map(_shape, whole, placed)
        else:
            self._cache = self._empty()
            self._state = jax.jit(lambda: empty_state(self.slots), out_shardings=placed[1])()

    def _problem(self, settings: JaxConfig) -> Problem:
        return Problem(
            platform=self.mesh.devices.flat[0].platform,
            dtype=self._dtype,
            cache_dtype=jnp.dtype(settings.cache_dtype),
            page_size=settings.page_size,
            kv_heads=self.spec.num_kv_heads,
            group=self.spec.num_heads // self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            softcap=self.spec.attention_softcap,
            head_shards=self.mesh.shape["tensor"],
            rows=self.slots // self.shards,
            columns=columns(self.context, settings.page_size),
        )

    @property
    def variants(self) -> list[Variant]:
        """Decode programs; on the CPU, which waits for nothing but itself, one that looks itself."""
        grouped = (False, True) if self.attention.reads_groups else (False,)
        return [Variant(*pair) for pair in itertools.product(grouped, (None,) if self._waits_for_nothing else (True, False))]

    @property
    def _waits_for_nothing(self) -> bool:
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    def warm_up(self) -> None:
        """Compiles every program, several at a time."""
        lowered = self.lower()
        with concurrent.futures.ThreadPoolExecutor() as pool, dispatching(self.mesh):
            self._compiled = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
        self.wait()

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Lowers every program for the shapes that it is called with, and returns them by name."""

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.mesh))

        weights, cache, groups = self._weights, self._cache, self.no_groups()
        orders = ints(self.slots, ORDER.itemsize // 4 + self.columns + groups.own.shape[1])
        lowered = {
            variant.name: self._decode.lower(weights, cache, self._state, orders, ints(*groups.items.shape), variant)
            for variant in self.variants
        }
        lowered["copy"] = self._copy.lower(cache, ints(self.shards, self.copies, 2))
        for rows, width in self.shapes:
            plan = ints(rows, 3 + self.columns + width)
            lowered[f"prefill {rows}x{width}"] = self._prefill.lower(weights, cache, plan)
        return lowered

    def no_groups(self) -> Groups:
        """Groups of nobody."""
        each = [no_groups(self.slots // self.shards)] * self.shards
        return Groups(*(np.concatenate(arrays) for arrays in zip(*each, strict=True)))

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    @property
    def held(self) -> tuple[Any, Cache]:
        """Weights and cache, as they lie on the devices."""
        return self._weights, self._cache

    @property
    def params(self) -> Any:
        """The weights as `hf.load` gives them, made anew by every call."""
        with dispatching(self.mesh):
            return self._stack(self._weights)

    def prefill(self, chunk: Chunk) -> None:
        shard = chunk.slots // (self.slots // self.shards)
        places = np.stack([shard, chunk.starts, chunk.counts], axis=1)
        name = "prefill {}x{}".format(*chunk.tokens.shape)
        self.dispatches[name] += 1
        with dispatching(self.mesh):
            plan = np.concatenate([places, chunk.tables, chunk.tokens], axis=1)
            self._cache = self._compiled[name](self._weights, self._cache, plan)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies pages onto pages, at most `copies` of them."""
        plan = np.full((self.shards, self.copies, 2), self.pages, np.int32)
        for row, copy in enumerate(copies):
            plan[copy.shard, row] = copy.source, copy.target
        self.dispatches["copy"] += 1
        with dispatching(self.mesh):
            self._cache = self._compiled["copy"](self._cache, plan)

    @property
    def copies(self) -> int:
        """Pages that one dispatch copies."""
        return min(self.slots, COPIES)

    def decode(self, orders: np.ndarray, tables: np.ndarray, groups: Groups, plain: bool) -> Decoded:
        """Carries out the orders, [B] of ORDER, then draws up to `decode_steps` tokens of every
        active slot.

        Args:
          tables: [B, C], with room for those tokens.
          groups: of the slots that take part.
          plain: their requests ask for a temperature alone.
        """
        grouped = self.attention.reads_groups and bool(groups.own.any())
        name = Variant(grouped, None if self._waits_for_nothing else plain).name
        plan = np.concatenate([orders.view(np.int32).reshape(self.slots, -1), tables, groups.own], axis=1)
        self.dispatches[name] += 1
        with dispatching(self.mesh):
            self._cache, self._state, drawn = self._compiled[name](self._weights, self._cache, self._state, plan, groups.items)
        for array in drawn:
            array.copy_to_host_async()  # behind the program, so that nobody has to ask for it then
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
                params = hf.load(directory, self.mesh, self._dtype, self._param_dtype, check_numbers=False)[1]  # the guard does
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

    def _cache_sharding(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(self.mesh, self.attention.spec(leaf.shape, self.mesh.shape))

    def _prefill_rows(self, weights: Any, cache: Cache, plan: Array) -> Cache:
        """plan [R, 3 + C + T]: shard, position of the first token, number of tokens, pages, tokens."""
        shard, starts, counts = plan[:, 0], plan[:, 1], plan[:, 2]
        tables, tokens = plan[:, 3 : 3 + self.columns], plan[:, 3 + self.columns :]
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            offsets = jnp.arange(tokens.shape[1])[None]
            positions = jnp.where(offsets < counts[:, None], starts[:, None] + offsets, OUTSIDE)
            model = CachedTransformer(self._graphdef, weights)
            return model.extend(tokens, Places(positions, tables, shard), cache, attention=self.attention)[1]

    def _copy_pages(self, cache: Cache, plan: Array) -> Cache:
        """plan [shards, n, 2]: source and target page; a target out of range does nothing."""

        def copied(x: Array, plan: Array) -> Array:
            source, target = plan[0, :, 0], plan[0, :, 1]
            return x.at[target].set(x.at[source].get(mode="clip"), mode="drop")

        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            if self.mesh.size == 1:
                return jax.tree.map(lambda x: copied(x, plan), cache)
            specs = jax.tree.map(lambda x: self.attention.spec(x.shape, self.mesh.shape), cache)
            every = jax.shard_map(
                lambda cache, plan: jax.tree.map(lambda x: copied(x, plan), cache),
                in_specs=(specs, PartitionSpec(BATCH)),
                out_specs=specs,
                check_vma=False,
            )
            return every(cache, plan)

    def _decode_steps(
        self, weights: Any, cache: Cache, state: DecodeState, plan: Array, items: Array, variant: Variant
    ) -> tuple[Cache, DecodeState, Decoded]:
        """plan [B, ORDER + C + 4]: orders, pages, `Groups.own`; items: of `Groups`."""
        orders, tables, own = jnp.split(plan, [ORDER.itemsize // 4, ORDER.itemsize // 4 + self.columns], axis=1)
        groups = Groups(items, own) if variant.grouped else None
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
                places = Places(positions[:, None], tables, groups=groups)
                hidden, cache = model.extend(state.token[:, None], places, cache, attention=self.attention)
                logits = constrain(model.logits(hidden[:, 0]), "logits")  # or XLA gathers the unembedding in every step
                token, logp = sample(constrain(logits, "rows"), state.sampling, variant.plain)
                drawn = Decoded(drawn.tokens.at[step].set(jnp.where(state.active, token, -1)), drawn.logp.at[step].set(logp))
                return step + 1, cache, advance(state, token), drawn

            start = (jnp.int32(0), cache, apply_orders(state, orders), none)
            if self._waits_for_nothing:
                return jax.lax.while_loop(going, one_step, start)[1:]  # ends early when every slot has
            return jax.lax.fori_loop(0, self.decode_steps, lambda _, carry: one_step(carry), start)[1:]


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
