"""Decoder-only transformers in flax nnx: Llama, Qwen2, Qwen3 and Gemma 3 text, told apart by a
`ModelSpec` alone.

Layers are stacked along a first axis and scanned: compile time does not grow with depth.

    tokens -> embedding -> [ norm attention + norm feed-forward + ] x L -> norm -> hidden
    hidden -> unembedding -> logits

Parameters are a plain nested dict, so that optimizers, checkpoints and shardings see ordinary
pytrees:

    graphdef, params = hf.load(directory, mesh, dtype, param_dtype)
    hidden = nnx.merge(graphdef, params)(token_ids, positions, segment_ids)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rljax.backends.jax.attention.interface import Attention, Bounds
from rljax.backends.jax.attention.xla import XlaAttention
from rljax.backends.jax.sharding import constrain
from rljax.hf.rope import frequencies
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import norms, projections

REMAT = ("none", "full", "dots")
NO_WINDOW = 2**30  # tokens; beyond any row
KERNELS = ("dot_product_attention_fwd_wrapper", "pallas_call")  # primitives of attention that are one kernel
BLOCK = 192  # terms that are summed one after the other where a model is `precise`; that of the BLAS under torch on x86


class Lora(NamedTuple):
    """Low-rank factors beside the kernels of some projections; `lora.add` makes them."""

    rank: int
    scale: float  # alpha / rank
    targets: tuple[str, ...]  # "q_proj", ...


class Linear(nnx.Module):
    """y = x W + b of one layer; parameters of all layers are stacked.

    LoRA factors stand beside W when there are any.
    """

    def __init__(
        self,
        layers: int,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        lora: Lora | None = None,
        precise: bool = False,
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((layers, inputs, outputs), param_dtype))
        self.bias = nnx.Param(jnp.zeros((layers, outputs), param_dtype)) if bias else None
        self.lora_scale = lora.scale if lora else 0.0
        self.lora_a = nnx.LoRAParam(jnp.zeros((layers, inputs, lora.rank), param_dtype)) if lora else None
        self.lora_b = nnx.LoRAParam(jnp.zeros((layers, lora.rank, outputs), param_dtype)) if lora else None
        self.dtype = jnp.dtype(dtype)
        self.block = BLOCK if precise else None

    def __call__(self, x: Array) -> Array:
        y = dot(x, self.kernel[...].astype(self.dtype), self.block)
        if self.lora_a is not None and self.lora_b is not None:
            low = dot(x, self.lora_a[...].astype(self.dtype))
            y += dot(low, self.lora_b[...].astype(self.dtype)) * self.lora_scale
        if self.bias is not None:
            y += self.bias[...].astype(self.dtype)
        return y


class Norm(nnx.Module):
    """RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467); float32 or wider.

    Gemma's scale is offset by 1.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, offset: float, param_dtype: DTypeLike, precise: bool = False
    ) -> None:
        self.scale = nnx.Param(jnp.zeros(shape, param_dtype))
        self.eps = eps
        self.offset = offset
        self.precise = precise

    def __call__(self, x: Array) -> Array:
        wide = x.astype(accumulated(x.dtype))
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps
        wide *= _reciprocal_root(square) if self.precise else jax.lax.rsqrt(square)
        return (wide * (self.scale[...].astype(wide.dtype) + self.offset)).astype(x.dtype)


class Table(nnx.Module):
    """An embedding or unembedding, [V, H]."""

    def __init__(self, vocabulary: int, hidden: int, param_dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(jnp.zeros((vocabulary, hidden), param_dtype))


class LayerInputs(NamedTuple):
    """Inputs that differ from layer to layer, beside the parameters.

    They are scanned over, so that one compiled body serves all layers.
    """

    window: Array  # int32, tokens
    rope: Array  # int32, index of the rotary embedding


class Rotation(NamedTuple):
    """Cosines and sines of each kind of rotary embedding. [kinds, B, T, 1, D / 2] float32"""

    cos: Array
    sin: Array


See = Callable[[Array, Array, Array], tuple[Array, Any]]
"""Attention of one layer: (query [B, T, N, D], key, value [B, T, K, D]) -> [B, T, N, D], and what the caller wants back."""


class Layers(nnx.Module):
    """All layers, stacked; the methods compute one layer, whose slice of the parameters the scan
    has put in their place.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm  # this and the next: Gemma
    post_feedforward_layernorm: Norm
    q_norm: Norm  # this and the next: where spec.qk_norm
    k_norm: Norm

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        attention: Attention,
        lora: Lora | None = None,
        precise: bool = False,
    ) -> None:
        for name, (outputs, inputs, bias) in projections(spec).items():
            short = name.split(".")[-1]
            factors = lora if lora and short in lora.targets else None
            setattr(self, short, Linear(spec.num_layers, inputs, outputs, bias, dtype, param_dtype, factors, precise))
        offset = 1.0 if spec.gemma_norms else 0.0
        for name, size in norms(spec).items():
            shape = (spec.num_layers, size)
            setattr(self, name.split(".")[-1], Norm(shape, spec.rms_norm_eps, offset, param_dtype, precise))
        self.spec = spec
        self.attention = attention

    def step(self, x: Array, rope: Array | int, rotation: Rotation, see: See) -> tuple[Array, Any]:
        """x [B, T, H] -> x after this layer, and what `see` gives beside its output."""
        spec = self.spec
        attended, extra = self.attend(self.input_layernorm(x), rope, rotation, see)
        if spec.gemma_norms:
            x = constrain(x + self.post_attention_layernorm(attended), "hidden")
            x = constrain(x + self.post_feedforward_layernorm(self.feed_forward(self.pre_feedforward_layernorm(x))), "hidden")
            return x, extra
        x = constrain(x + attended, "hidden")
        return constrain(x + self.feed_forward(self.post_attention_layernorm(x)), "hidden"), extra

    def attend(self, x: Array, rope: Array | int, rotation: Rotation, see: See) -> tuple[Array, Any]:
        spec = self.spec
        rows, length, _ = x.shape
        query = self.q_proj(x).reshape(rows, length, spec.num_heads, spec.head_dim)
        key = self.k_proj(x).reshape(rows, length, spec.num_kv_heads, spec.head_dim)
        value = self.v_proj(x).reshape(rows, length, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = rotation.cos[rope], rotation.sin[rope]
        query, key = constrain(rotate(query, cos, sin), "heads"), constrain(rotate(key, cos, sin), "heads")
        out, extra = see(query, key, constrain(value, "heads"))
        return self.o_proj(out.reshape(rows, length, spec.num_heads * spec.head_dim)), extra

    def feed_forward(self, x: Array) -> Array:
        gate = constrain(ACTIVATIONS[self.spec.activation](self.gate_proj(x)), "feed_forward")
        return self.down_proj(gate * self.up_proj(x))


class Transformer(nnx.Module):
    """A causal language model.

    Made by `hf.load`, or abstractly by `abstract`; a plain call leaves parameters zero.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        lora: Lora | None = None,
        precise: bool = False,
        attention: Attention = XlaAttention(),
        unroll: bool = False,
    ) -> None:
        """
        Args:
          dtype: of the arithmetic.
          param_dtype: of the stored parameters.
          remat: what the backward pass recomputes of a layer.
          precise: sums in blocks and correctly rounded roots in the norms, for logits nearer to
            those of exact arithmetic (and of transformers) where a long sum is held in one float32:
            XLA on the CPU. Costs time.
          attention: of the rows of a call.
          unroll: layers one after the other instead of in a loop: what the backward pass needs is
            never copied into stacked arrays, and compile time grows with depth.
        """
        if remat not in REMAT:
            raise ValueError(f"remat must be one of {', '.join(REMAT)}, not {remat!r}")
        self.spec = spec
        self.dtype = jnp.dtype(dtype)
        self.remat = remat
        self.precise = precise
        self.unroll = unroll
        self.embed_tokens = Table(spec.vocab_size, spec.hidden_size, param_dtype)
        self.layers = Layers(spec, dtype, param_dtype, attention, lora, precise)
        offset = 1.0 if spec.gemma_norms else 0.0
        self.norm = Norm((spec.hidden_size,), spec.rms_norm_eps, offset, param_dtype, precise)
        self.lm_head = None if spec.tie_word_embeddings else Table(spec.vocab_size, spec.hidden_size, param_dtype)

    def __call__(
        self,
        token_ids: Array,
        positions: Array,
        segment_ids: Array | None = None,
        *,
        bounds: Bounds | None = None,
    ) -> Array:
        """Hidden states after the final norm; those at t predict token t + 1.

        Args:
          token_ids: [B, T] int32.
          positions: [B, T] int32, of each token in its segment.
          segment_ids: [B, T] int32; a token sees its own segment alone. None: a row is one
            segment.
          bounds: of the segments, as `attention.bounds` gives them; needed where it does.

        Returns:
          [B, T, H] in `dtype`.
        """
        return self.norm(self._layered(token_ids, positions, segment_ids, bounds, keep=False)[0])

    def hidden_states(self, token_ids: Array, positions: Array) -> Array:
        """Returns the embedding, the output of each layer and that of the final norm.

        A row is one segment. [L + 2, B, T, H] in `dtype`.
        """
        last, outputs = self._layered(token_ids, positions, None, None, keep=True)
        return jnp.concatenate([self.embed(token_ids)[None], outputs, self.norm(last)[None]])

    def _layered(
        self, token_ids: Array, positions: Array, segment_ids: Array | None, bounds: Bounds | None, *, keep: bool
    ) -> tuple[Array, Any]:
        """Runs all layers. Returns the output of the last one, and if `keep` those of all, stacked."""
        spec = self.spec
        graphdef, params = nnx.split(self.layers)
        attention = self.layers.attention
        segments = None if segment_ids is None else attention.segments(segment_ids, bounds)
        see = functools.partial(
            attention,
            scale=spec.attention_scale,
            softcap=spec.attention_softcap,
            segments=segments,
            windows=tuple(dict.fromkeys(spec.windows)),
        )
        windows = [NO_WINDOW if window is None else window for window in spec.windows]
        inputs = LayerInputs(jnp.asarray(windows), jnp.asarray(spec.rope_of_layer))
        rotation = rotation_at(spec, positions)

        def body(hidden: Array, scanned: tuple[Any, LayerInputs]) -> tuple[Array, Array | None]:
            layer, (window, rope) = nnx.merge(graphdef, scanned[0]), scanned[1]
            seen = functools.partial(see, window=window if spec.sliding else None)
            hidden = layer.step(hidden, rope, rotation, lambda *qkv: (seen(*qkv), None))[0]
            return hidden, hidden if keep else None

        unroll = spec.num_layers if self.unroll else 1
        layer_body = rematerialized(body, self.remat, unrolled=self.unroll)
        stacked = (self._computed_in(params), inputs)
        return jax.lax.scan(layer_body, self.embed(token_ids), stacked, unroll=unroll)

    def embed(self, token_ids: Array) -> Array:
        """[B, T] -> [B, T, H] in `dtype`."""
        x = self.embed_tokens.kernel[...][token_ids].astype(self.dtype)
        if self.spec.embedding_scale != 1.0:
            x *= jnp.asarray(self.spec.embedding_scale, self.dtype)
        return constrain(x, "hidden")

    def _computed_in(self, params: Any) -> Any:
        """The stacked matrices in `dtype`, rounded once: their gradients are stacked in it too.

        Norms keep their precision.
        """
        return jax.tree.map(lambda a: a.astype(self.dtype) if a.ndim > 2 else a, params)

    def unembedding(self) -> Array:
        """[V, H] in `dtype`; the embedding itself where they are tied."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.kernel[...].astype(self.dtype)

    def logits(self, hidden: Array) -> Array:
        """[..., H] -> [..., V] float32, soft-capped where the model does that."""
        out = jax.lax.dot_general(
            hidden,
            self.unembedding(),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=_precision(hidden.dtype),
            preferred_element_type=accumulated(hidden.dtype),
        )
        cap = self.spec.final_softcap
        return out if cap is None else jnp.tanh(out / cap) * cap


def abstract(
    spec: ModelSpec,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    lora: Lora | None = None,
    precise: bool = False,
    attention: Attention = XlaAttention(),
    unroll: bool = False,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Graph definition and the shapes of the parameters (jax.ShapeDtypeStruct); nothing is
    allocated.
    """
    make = functools.partial(
        Transformer,
        spec,
        dtype=dtype,
        param_dtype=param_dtype,
        remat=remat,
        lora=lora,
        precise=precise,
        attention=attention,
        unroll=unroll,
    )
    model = nnx.eval_shape(make)
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def rotation_at(spec: ModelSpec, positions: Array) -> Rotation:
    """Computes the rotations of every kind of rotary embedding at positions [B, T]."""
    inverse = jnp.asarray(np.stack([frequencies(rope, spec.head_dim) for rope in spec.ropes]))  # [kinds, D / 2]
    factor = jnp.asarray([rope.attention_factor for rope in spec.ropes], jnp.float32)[:, None, None, None, None]
    angle = positions.astype(jnp.float32)[None, :, :, None, None] * inverse[:, None, None, None, :]
    return Rotation(jnp.cos(angle) * factor, jnp.sin(angle) * factor)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding (Su et al.

    2021, arXiv:2104.09864) of x [B, T, heads, D]; dimension i is paired with i + D / 2.
    """
    first, second = jnp.split(x.astype(accumulated(x.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rematerialized(body: Callable[..., Any], choice: str, *, unrolled: bool) -> Callable[..., Any]:
    """The scan body under a remat choice.

    "none" keeps the output of every matmul and of an attention kernel, "dots" of matmuls with
    weights alone, "full" only what goes from layer to layer. Elementwise work is always done
    again: on every device that is cheaper than storing it.
    """
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    policy = {"none": _is_matmul, "dots": dots, "full": None}[choice]
    merged = unrolled and choice != "none"  # in straight-line code XLA would find that it has the values already
    return jax.checkpoint(body, prevent_cse=merged, policy=policy)


def _is_matmul(primitive: Any, *_: Any, **params: Any) -> bool:
    """A checkpoint policy: matrix products, and the kernels of `attention` with what their
    gradient needs.
    """
    return primitive.name in KERNELS or bool(jax.checkpoint_policies.dots_saveable(primitive, *_, **params))


def dot(x: Array, kernel: Array, block: int | None = None) -> Array:
    """x [..., I] times kernel [I, O], in the dtype of both; float32 means float32 (not tf32 or
    bf16 passes).

    As a matrix product of two dimensions: with more, XLA transposes activations for the weight
    gradient on the CPU. There it also adds up all I products of an entry one after the other, for
    an error of about sqrt(I) roundings; with `block`, so many at a time, and then those sums
    (blocked summation: Higham 1993, doi:10.1137/0914050).
    """
    flat = x.reshape(-1, x.shape[-1])
    starts = range(0, x.shape[-1], block or x.shape[-1])
    parts = [slice(start, start + starts.step) for start in starts]
    sums = (jnp.matmul(flat[:, part], kernel[part], precision=_precision(x.dtype)) for part in parts)
    return functools.reduce(jnp.add, sums).reshape(*x.shape[:-1], kernel.shape[-1])


def _reciprocal_root(x: Array) -> Array:
    """1 / sqrt(x), each rounded once.

    XLA would make its `rsqrt` of it, which on the CPU is an approximation.
    """
    return 1 / jax.lax.optimization_barrier(jnp.sqrt(x))


def accumulated(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of sums, norms and softmax: float32, or float64 in float64 models."""
    return jnp.promote_types(dtype, jnp.float32)


def _precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
