"""The policy's network: what is trained of it, what is frozen, and programs that run on both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from rljax.backends.jax import hf, lora
from rljax.backends.jax.attention.choice import choose, problem_of
from rljax.backends.jax.mesh import dispatching, first_device
from rljax.backends.jax.model import Transformer
from rljax.backends.jax.multihost import describe, fetch, put
from rljax.backends.jax.rounding import Rounding, rounded, rounded_away
from rljax.backends.jax.sharding import replicated
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.tuning import longest_row, remat_of, unrolled
from rljax.hf.adapter import read_adapter
from rljax.hf.spec import ModelSpec
from rljax.metrics.mean import Mean
from rljax.objective.spec import MeanArrays

Tree = Any  # a pytree of arrays
MASTER = jnp.float32  # weights and moments


class Policy:
    """A model in two trees of parameters: `trained` (all, or the LoRA adapters) and `frozen`
    (nothing, or the base).

    Example: program = policy.program(lambda model, rows: model.logits(...));
    program(policy.trained, policy.frozen, rows)
    """

    def __init__(self, config: Config, mesh: Mesh, model_dir: Path, *, described: bool = False) -> None:
        """
        Args:
          described: the parameters are shapes alone, to compile for devices that are not there.
        """
        actor, settings = config.actor, JaxConfig.of(config)
        self.mesh = mesh
        self.dtype = jnp.dtype(actor.dtype)
        self.spec = ModelSpec.from_directory(model_dir)
        base_dtype = MASTER if actor.lora.rank == 0 or settings.bitwise else self.dtype  # a frozen base needs no master copy
        remat = remat_of(config, self.spec, mesh)
        self.attention = choose(
            settings.attention, problem_of(self.spec, actor.dtype, first_device(mesh), longest_row(config, mesh))
        )
        self.graphdef, params = hf.load(
            model_dir,
            mesh,
            actor.dtype,
            base_dtype,
            remat=remat,
            precise=settings.precise,
            attention=self.attention,
            unroll=unrolled(config, self.spec, remat, mesh),
            describe=described,
        )
        self.trained, self.frozen = params, {}
        self._adapted = actor.lora.rank > 0
        if self._adapted:
            self._scale = actor.lora.alpha / actor.lora.rank
            targets = actor.lora.target_modules
            self.graphdef, adapters = lora.add(
                self.graphdef,
                params,
                rank=actor.lora.rank,
                alpha=actor.lora.alpha,
                targets=targets,
                seed=config.seed,
                mesh=mesh,
                place=describe if described else put,
                given=read_adapter(actor.lora.path, self.spec, actor.lora) if actor.lora.path else None,
            )
            self.trained, self.frozen = adapters, params
        dtype = MASTER if settings.bitwise else jnp.dtype(settings.sampler_dtype)
        self._publish = jax.jit(lambda trained, frozen: _published(self._merged(trained, frozen), dtype))
        self._whole = jax.jit(self._merged)
        self.rounding: Rounding | None = None if self._adapted else functools.partial(_rounded, dtype=dtype)
        measure = functools.partial(self._rounded_away, dtypes=(base_dtype, dtype))
        self._measure = jax.jit(measure, out_shardings=replicated(mesh))

    def model(self, trained: Tree, frozen: Tree) -> Transformer:
        """Inside a traced function."""
        return nnx.merge(self.graphdef, frozen, trained) if self._adapted else nnx.merge(self.graphdef, trained)

    def program(self, function: Callable[[Transformer, Any], Any]) -> Any:
        """(trained, frozen, rows) -> function(model, rows), jitted, its result on every device so
        that any host can read it.
        """
        return jax.jit(
            lambda trained, frozen, rows: function(self.model(trained, frozen), rows), out_shardings=replicated(self.mesh)
        )

    def merged(self) -> Tree:
        """The parameters with the adapters folded in, as `hf.load` gives them.

        Not to be kept: an update may donate them.
        """
        if not self._adapted:
            return self.trained
        with dispatching(self.mesh):
            return self._whole(self.trained, self.frozen)

    def copied(self, dtype: Any) -> Tree:
        """A copy of what is trained, in buffers of its own."""
        with dispatching(self.mesh):
            return jax.jit(lambda trained: jax.tree.map(lambda a: _copy(a, dtype), trained))(self.trained)

    def published(self) -> Tree:
        """A copy of `merged` for a sampler: matrices in `jax.sampler_dtype` (float32 in the
        bitwise mode), norms in float32.

        The buffers are new and the learner keeps no hold of them, so that no later update can
        donate them away: a sampler may keep them as they are, or reshard them. Where the mesh is
        of several processes they are on the host, of process 0 alone.
        """
        with dispatching(self.mesh):
            copies = self._publish(self.trained, self.frozen)
        return copies if jax.process_count() == 1 else jax.tree.map(fetch, copies)

    def adapters(self) -> Tree | None:
        """A copy of the adapters, for `rounded_away` after the update; None if there are none."""
        return self.copied(MASTER) if self._adapted else None

    def rounded_away(self, before: Tree) -> Mean:
        """Returns the share of the weights that an update moved, but whose published value stayed.

        It is measured on the adapted projections of the middle layer.

        Args:
          before: the adapters before the update.
        """
        with dispatching(self.mesh):
            found = self._measure(before, self.trained, self.frozen)
        found = jax.device_get(found)
        return Mean(float(found.sum), float(found.count))

    def _rounded_away(self, before: Tree, after: Tree, frozen: Tree, *, dtypes: Sequence[Any]) -> MeanArrays:
        middle = self.spec.num_layers // 2

        def updates(adapters: Tree) -> Tree:
            one = jax.tree.map(lambda a: a[middle : middle + 1], adapters)
            return lora.updates(one, self._scale)

        def published(updates: Tree) -> Tree:
            kernels = {name: frozen["layers"][name]["kernel"][middle : middle + 1] + update for name, update in updates.items()}
            for dtype in dtypes:
                kernels = jax.tree.map(functools.partial(rounded, dtype=dtype), kernels)
            return kernels

        old, new = updates(before), updates(after)
        return rounded_away(old, new, published(old), published(new))

    def _merged(self, trained: Tree, frozen: Tree) -> Tree:
        return lora.merge(frozen, trained, self._scale) if self._adapted else trained


def _copy(array: jax.Array, dtype: Any) -> jax.Array:
    return jnp.array(array, dtype, copy=True)  # jit would hand an unchanged input through, buffer and all


def _published(params: Tree, dtype: Any) -> Tree:
    return jax.tree.map_with_path(lambda path, a: _copy(a, _published_dtype(path, dtype)), params)


def _rounded(params: Tree, dtype: Any) -> Tree:
    return jax.tree.map_with_path(lambda path, a: rounded(a, _published_dtype(path, dtype)), params)


def _published_dtype(path: tuple[Any, ...], dtype: Any) -> Any:
    return MASTER if path[-1].key == "scale" else dtype
