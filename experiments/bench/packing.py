"""Packing 100k lengths: milliseconds, rows over sum/capacity, balance of the ranks.

python -m experiments.bench.packing

Balance is the cost of the dearest rank over the cheapest.
"""

import time

import numpy as np

from rljax.batching import packing
from rljax.experiments import main

N = 100_000


def _cases(random: np.random.Generator) -> dict[str, tuple[np.ndarray, int]]:
    lognormal = np.clip(random.lognormal(6.5, 0.8, N).astype(int) + 1, 1, 8192)
    return {
        "uniform 100..1024 in 4096": (random.integers(100, 1025, N), 4096),
        "uniform 1..4096 in 4096": (random.integers(1, 4097, N), 4096),
        "log-normal, mean 915, in 8192": (lognormal, 8192),
        "uniform 1..16384 in 32768": (random.integers(1, 16385, N), 32768),
    }


def bench() -> None:
    for name, (lengths, capacity) in _cases(np.random.default_rng(0)).items():
        seconds, rows = [], 0
        for _ in range(7):
            start = time.perf_counter()
            rows = packing.pack(lengths, capacity).shape[0]
            seconds.append(time.perf_counter() - start)
        over = rows / (lengths.sum() / capacity) - 1
        costs = packing.cost(lengths, 1.0, 1e-4)
        totals = [costs[part].sum() for part in packing.balance(costs, 8)]
        print(
            f"{name:32s} {np.median(seconds) * 1e3:6.1f} ms (median of {len(seconds)}; best {min(seconds) * 1e3:.1f})"
            f"  {rows} rows, {over:.3%} over sum/capacity;  8 ranks within {max(totals) / min(totals) - 1:.5%}"
        )


if __name__ == "__main__":
    main.run_main(bench)
