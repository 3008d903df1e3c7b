"""The buffer: put and take of 25 KB groups a second, and the journal's share of it.

python -m experiments.bench.buffer
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app

from rljax.buffer import Buffer, Limits
from rljax.journal import GroupLog
from rljax.types import Finish, Group, Prompt, Trajectory

ITEMS, BATCH, TOKENS = 20_000, 64, 1923  # 13 bytes a token: 25 KB


class Endless:
    """Prompts without content."""

    def __init__(self) -> None:
        self._position = 0

    def __next__(self) -> Prompt:
        self._position += 1
        return Prompt(f"0/{self._position}", (), {})

    def __len__(self) -> int:
        return ITEMS

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def _group(version: int) -> Group:
    mask = np.arange(TOKENS) >= 200
    versions = np.where(mask, version, -1).astype(np.int32)
    ids, logp = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.float32)
    return Group("0/0", (Trajectory(ids, mask, logp, versions, 1.0, {}, Finish.STOP),))


def _through(groups: list[Group], journals: GroupLog | None) -> float:
    """Seconds to admit, finish and take every item, publishing after each batch."""
    buffer = Buffer(Endless(), Limits(2, BATCH, 3 * BATCH, None, None))
    start = time.perf_counter()
    for batch in range(0, ITEMS, BATCH):
        for group in groups[batch : batch + BATCH]:
            ticket = buffer.admit()
            assert ticket is not None
            if journals is not None:
                journals.finished(ticket, group, accepted=True)
            buffer.finish(ticket, group)
        if buffer.take() is not None:
            buffer.publish()
    return time.perf_counter() - start


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError("takes no arguments")
    groups = [_group(i // BATCH) for i in range(ITEMS)]
    size = sum(getattr(groups[0].trajectories[0], n).nbytes for n in ("token_ids", "loss_mask", "behavior_logp", "versions"))
    seconds = [_through(groups, None) for _ in range(5)]
    print(f"put + take of {size / 1e3:.1f} KB: {ITEMS / np.median(seconds):,.0f} a second (best {ITEMS / min(seconds):,.0f})")
    with tempfile.TemporaryDirectory() as directory:
        journals = GroupLog(Path(directory))
        journals.begin(0, ITEMS)
        took = _through(groups, journals)
        journals.close()
    print(f"the same, every group journaled to {tempfile.gettempdir()}: {ITEMS / took:,.0f} a second")


if __name__ == "__main__":
    app.run(main)
