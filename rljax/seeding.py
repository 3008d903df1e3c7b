"""Seeds that follow from names, so that a run can stop anywhere and draw the same numbers when it
goes on.
"""

from __future__ import annotations

import hashlib


def seed_for(run_seed: int, uid: str, sample: int, attempt: int = 0) -> int:
    """The seed of one request, in [0, 2**31): a hash of its name, so it depends on neither slot,
    order nor process.

    Args:
      run_seed: `config.seed`.
      uid: of the prompt.
      sample: which of the group's n_samples.
      attempt: how often the prompt was given up before; another attempt draws other samples.

    Example: seed_for(1, "0/17", 3) == seed_for(1, "0/17", 3, attempt=0)
    """
    name = f"{run_seed}|{sample}|{attempt}|{uid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little") & 0x7FFFFFFF
