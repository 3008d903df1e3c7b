"""Attention over a paged cache, of a new token per row (decode) or a chunk of some rows (prefill).

interface.py  what an implementation is, and the problems it is asked to solve
registry.py   the implementation that a run uses
groups.py     rows that share pages, found on the host
xla.py        implementations, by name below; pallas_gpu.py, pallas_tpu.py

One interface with implementations, named by `jax.decode_attention`:

    auto        the first below that can do what a run asks for
    pallas_gpu  a Pallas kernel for GPUs, in bfloat16 or float16: reads pages in place, up to each
                row's own length, and what the rows of a group share once
    pallas_tpu  Pallas kernels for TPUs, in bfloat16 or float32: write and read pages in place, as
                far as each row reaches
    xla         plain XLA, anywhere: the reference, and the CPU's; goes through all rows as far as
                the longest reaches
"""

from rljax.backends.jax.decode_attention.groups import HEAD, MEMBERS, Groups, capacity, find_groups, no_groups
from rljax.backends.jax.decode_attention.interface import DecodeAttention, Pages, Places, Problem, write_and_attend
from rljax.backends.jax.decode_attention.registry import IMPLEMENTATIONS, choose

__all__ = [
    "HEAD",
    "IMPLEMENTATIONS",
    "MEMBERS",
    "DecodeAttention",
    "Groups",
    "Pages",
    "Places",
    "Problem",
    "capacity",
    "choose",
    "find_groups",
    "no_groups",
    "write_and_attend",
]
