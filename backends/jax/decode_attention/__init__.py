"""Attention of new tokens over a cache, one per row (decode) or a chunk of some rows (prefill).

One interface with implementations, named by `jax.decode_attention`:

    auto        the first below that can do what a run asks for
    pallas_gpu  a Pallas kernel for GPUs, in bfloat16 or float16: reads each row in place, up to
                its own length
    xla         plain XLA, anywhere: the reference, and the CPU's; reads every row up to the
                longest, in powers of two
"""

from rljax.backends.jax.decode_attention.interface import Attend, DecodeAttention, Problem
from rljax.backends.jax.decode_attention.registry import IMPLEMENTATIONS, choose
from rljax.backends.jax.decode_attention.xla import spans

__all__ = ["IMPLEMENTATIONS", "Attend", "DecodeAttention", "Problem", "choose", "spans"]
