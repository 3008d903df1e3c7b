"""Keeps the memory that a program frees in its process, in huge pages (Linux with glibc).

By default glibc gives a large buffer back to the system when it is freed. A program that takes the
same buffers in every step, as XLA's on a CPU does, then has each of their pages zeroed and mapped
again by the kernel: 77,000 pages and a tenth of the time of the step that docs/benchmarks.md
describes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

RESERVED = 4 << 30  # bytes of address space that huge pages are asked for; unused, they take no memory
HUGE_PAGE = 2 << 20  # bytes

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def keep_freed_memory() -> bool:
    """Has malloc keep what is freed from now on, for later allocations.

    The process then never shrinks. Call it before threads start that allocate large buffers: one
    that has a heap of its own goes on giving memory back.

    Returns:
      Whether this system's malloc can.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return False
    settings = {
        _M_ARENA_MAX: 1,  # one heap for all threads, for others are small and large buffers are mapped beside them
        _M_MMAP_MAX: 0,  # no buffer is mapped beside the heap
        _M_TRIM_THRESHOLD: -1,  # the heap is never trimmed
        _M_TOP_PAD: 32 * HUGE_PAGE,  # by which it grows at least
    }
    if not all(libc.mallopt(name, value) for name, value in settings.items()):
        return False
    _ask_for_huge_pages(libc)
    return True


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Extends the heap by RESERVED bytes that are not touched, and marks them for huge pages."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = libc.malloc(RESERVED)
    if start is None:  # more than this process may have: small pages do as well
        return
    libc.free(start)
    first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + RESERVED) // HUGE_PAGE * HUGE_PAGE
    libc.madvise(first, last - first, mmap.MADV_HUGEPAGE)  # a kernel without them says so, and nothing is lost
