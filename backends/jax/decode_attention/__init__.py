"""Attention of one new token per row over the keys and values cached for it: one interface, several implementations.

auto        the first below that can do what a run asks for
pallas_gpu  jax.experimental.pallas.ops.gpu.decode_attention: on a GPU, in bfloat16 or float16; each row up to its own length
xla         plain XLA, anywhere: the reference, and the CPU's; every row up to the longest, in powers of two
"""

from rljax.backends.jax.decode_attention.interface import DecodeAttention, Problem
from rljax.backends.jax.decode_attention.registry import IMPLEMENTATIONS, choose
from rljax.backends.jax.decode_attention.xla import cached_attention, spans

__all__ = ["IMPLEMENTATIONS", "DecodeAttention", "Problem", "cached_attention", "choose", "spans"]
