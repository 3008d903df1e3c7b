"""AdamW with a schedule, a factor of the rate that may change, global-norm clipping, and steps that
are skipped when the gradient isn't finite or a bound is broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding

from rljax.backends.jax.rounding import Rounding, share_rounded_away
from rljax.config.learning_rate import SCHEDULES
from rljax.config.schema import OptimizerConfig
from rljax.errors import UserError
from rljax.metrics.guardrails import GRAD_NORM, UpdateBound
from rljax.objective.spec import MeanArrays

Tree = Any  # a pytree of arrays


class StepStats(NamedTuple):
    """Report of one optimizer step. Scalars, float32."""

    grad_norm: jax.Array  # global norm before clipping
    lr: jax.Array  # of this step
    skipped: jax.Array  # 1 when the gradient was not finite and nothing changed
    out_of_bounds: jax.Array | None  # 1 when a bound was broken and nothing changed; None without bounds
    steps: jax.Array  # that the moments have seen, this one included
    rounded_away: MeanArrays | None  # share of the moved weights whose published value stayed; None if not asked for


class RateFactor(NamedTuple):
    """State of the last transformation of the optimizer, which multiplies its updates."""

    factor: jax.Array  # scalar float32


def scale_by_factor() -> optax.GradientTransformation:
    """Multiplies updates, and so the learning rate, by a factor in the state (`set_rate_factor`)."""

    def update(updates: Tree, state: RateFactor, params: Tree | None = None) -> tuple[Tree, RateFactor]:
        return jax.tree.map(lambda u: u * state.factor.astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda params: RateFactor(jnp.ones((), jnp.float32)), update)


def make_schedule(config: OptimizerConfig, total_steps: int | None, key: str) -> optax.Schedule:
    """Learning rate by optimizer step, counted from 0.

    It rises linearly over the first `warmup_steps_proportion` of the run, reaching `lr` at the
    last of those steps, and then falls towards `lr * min_lr_ratio`, which it would reach one step
    after the last of the run, so that no step has a rate of 0 (not at all when "constant").

    Args:
      total_steps: optimizer steps of the run; None when it is not known, which only a constant
        rate can do with.
      key: config key of `config`, for messages.
    """
    if config.lr_scheduler_type not in SCHEDULES:
        raise UserError(f"{key}.lr_scheduler_type: no schedule {config.lr_scheduler_type!r} ({', '.join(SCHEDULES)})")
    if config.lr_scheduler_type == "constant" and config.warmup_steps_proportion == 0:
        return optax.constant_schedule(config.lr)
    if total_steps is None:
        raise UserError(f"total_train_steps: needed for the schedule of {key} (set it, or a constant rate with no warmup)")
    warmup = round(config.warmup_steps_proportion * total_steps)
    decay = max(total_steps - max(warmup - 1, 0), 1)  # steps from the peak to the one after the last
    if config.lr_scheduler_type == "constant":
        tail = optax.constant_schedule(config.lr)
    elif config.lr_scheduler_type == "linear":
        tail = optax.linear_schedule(config.lr, config.lr * config.min_lr_ratio, decay)
    else:
        tail = optax.cosine_decay_schedule(config.lr, decay, alpha=config.min_lr_ratio)
    if warmup == 0:
        return tail
    rise = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
    return optax.join_schedules([rise, tail], [warmup - 1])


def decays(path: tuple[Any, ...]) -> bool:
    """Returns whether weight decay applies to the parameter at a path of the tree.

    It does not apply to norms and biases.
    """
    name = jax.tree_util.keystr(path).lower()
    return "norm" not in name and "bias" not in name


def decay_mask(params: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) as functions of (parameters, state,
    gradient).

    Example: params, state, stats = optimizer.apply(params, optimizer.init(params), grads)
    """

    def __init__(
        self,
        config: OptimizerConfig,
        total_steps: int | None,
        key: str,
        bounds: Sequence[UpdateBound] = (),
        rounding: Rounding | None = None,
    ) -> None:
        """bounds: a step whose metrics break one is not taken. rounding: of the parameters where
        they are published, to report what of a step it takes away.
        """
        if config.type != "adamw":
            raise UserError(f"{key}.type: no optimizer {config.type!r} (adamw)")
        self.schedule = make_schedule(config, total_steps, key)
        adamw = optax.adamw(
            self.schedule, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=decay_mask
        )
        clip = optax.clip_by_global_norm(config.gradient_clipping) if config.gradient_clipping > 0 else optax.identity()
        self.transform = optax.chain(clip, adamw, scale_by_factor())
        self._bounds, self._rounding = bounds, rounding

    def init(self, params: Tree) -> Tree:
        """State of zeros, in the shapes and dtypes of the parameters."""
        return self.transform.init(params)

    def describe(self, params: Tree, elsewhere: Sharding) -> Tree:
        """Shapes of `init` for shapes of parameters: moments lie as those do, counters `elsewhere`."""
        return optax.tree.map_params(
            self.transform,
            lambda leaf, param: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding),
            jax.eval_shape(self.init, params),
            params,
            transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=elsewhere),
        )

    def apply(
        self, params: Tree, state: Tree, grads: Tree, metrics: Mapping[str, MeanArrays] | None = None
    ) -> tuple[Tree, Tree, StepStats]:
        """One step.

        A gradient that isn't finite, or a broken bound, changes neither parameters nor state.
        Traceable; no host transfer.

        Args:
          metrics: of the minibatch, for the bounds.
        """
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        broken = self._broken(norm, metrics or {})
        taken = finite if broken is None else finite & ~broken
        updates, stepped = self.transform.update(grads, state, params)

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(taken, new, old)

        moved = jax.tree.map(lambda p, u: jnp.where(taken, p + u, p).astype(p.dtype), params, updates)
        rounding = self._rounding
        stats = StepStats(
            norm.astype(jnp.float32),
            jnp.asarray(self.schedule(step_count(state)), jnp.float32) * rate_factor(state),
            jnp.where(finite, 0.0, 1.0).astype(jnp.float32),
            None if broken is None else (finite & broken).astype(jnp.float32),
            jnp.where(taken, step_count(stepped), step_count(state)).astype(jnp.float32),
            None if rounding is None else share_rounded_away(params, moved, rounding, taken),
        )
        return moved, jax.tree.map(keep, stepped, state), stats

    def _broken(self, norm: jax.Array, metrics: Mapping[str, MeanArrays]) -> jax.Array | None:
        """Finds whether any bound is broken: a scalar bool; None without bounds."""
        if not self._bounds:
            return None
        one = jnp.ones((), norm.dtype)
        known = {**metrics, GRAD_NORM: MeanArrays(norm, one, norm, norm)}
        broken = jnp.zeros((), bool)
        for limit in self._bounds:
            mean = known[limit.guard.metric]
            within = limit.guard.within(mean.sum / jnp.maximum(mean.count, 1), limit.bound)
            broken |= (mean.count > 0) & jnp.logical_not(within)
        return broken


def step_count(state: Tree) -> jax.Array:
    """Steps applied so far: scalar int32. Skipped steps don't count."""
    return _adam(state).count


def rate_factor(state: Tree) -> jax.Array:
    """The factor of the learning rate: scalar float32."""
    return next(n.factor for n in jax.tree.leaves(state, is_leaf=_is_factor) if _is_factor(n))


def set_rate_factor(state: Tree, factor: float) -> Tree:
    """The state with another factor of the learning rate."""

    def replace(node: Any) -> Any:
        return RateFactor(jnp.full_like(node.factor, factor)) if _is_factor(node) else node

    return jax.tree.map(replace, state, is_leaf=_is_factor)


def _is_factor(node: Any) -> bool:
    return isinstance(node, RateFactor)


def moments(state: Tree) -> tuple[Tree, Tree]:
    """First and second moments, trees like the parameters."""
    adam = _adam(state)
    return adam.mu, adam.nu


def set_moments(state: Tree, mu: Tree, nu: Tree, count: jax.Array) -> Tree:
    """The state with other moments and another step count (a buffer of its own for each counter,
    so that it can be donated).
    """

    def replace(node: Any) -> Any:
        if isinstance(node, optax.ScaleByAdamState):
            return node._replace(mu=mu, nu=nu, count=count)
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=jnp.array(count, copy=True))
        return node

    return jax.tree.map(replace, state, is_leaf=_is_counted)


def _is_counted(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState | optax.ScaleByScheduleState)


def _adam(state: Tree) -> optax.ScaleByAdamState:
    return next(n for n in jax.tree.leaves(state, is_leaf=_is_counted) if isinstance(n, optax.ScaleByAdamState))
