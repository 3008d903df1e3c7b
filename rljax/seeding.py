"""Seeds derived from names, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib


def seed_for(run_seed: int, uid: str, sample: int, attempt: int = 0) -> int:
    """Returns the seed of one request, in [0, 2**31).

    It is a hash of the arguments, so it does not depend on the order of requests or on the process
    that sends them.

    Args:
      run_seed: `config.seed`.
      uid: the prompt's uid.
      sample: index of the sample in its group, from 0 to n_samples - 1.
      attempt: how many times the prompt was generated before; each attempt draws other samples.

    Example: seed_for(1, "0/17", 3) == seed_for(1, "0/17", 3, attempt=0)
    """
    name = f"{run_seed}|{sample}|{attempt}|{uid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") & 0x7FFFFFFF


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of a turn: the episode's own for turn 0, then a multiplicative hash of it.

    Hashed seeds are spread over [0, 2**31).
    """
    return (seed + turn * 0x9E3779B1) % 2**31
