"""Batches for tests of learners: made-up trajectories in chosen rows, and configs to train on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.batching.batch import Batch
from rljax.config.schema import Config
from rljax.metrics.mean import Mean
from rljax.testing import models
from rljax.testing.models import VOCABULARY
from rljax.types import PROMPT_VERSION

UPDATE = "ppo_actor/update"


def config_of(**overrides: Any) -> Config:
    """Returns a config for the tiny model; keys as in `config_of(**{"actor.kl_ctl": 0.1})`."""
    small = {
        "actor.gradient_checkpointing": "none",
        "actor.optimizer.lr": 1e-2,
        "actor.mb_spec.max_tokens_per_row": 64,
        "actor.mb_spec.rows_per_mb": 4,
        "critic.optimizer.lr": 1e-2,
    }
    return models.config_of(**(small | overrides))


@dataclasses.dataclass(frozen=True)
class Episode:
    """Per-token arrays of one trajectory, by field of `Batch`."""

    arrays: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.arrays["token_ids"])


def episodes(count: int, *, seed: int = 0, longest: int = 30, lag: float = 0.3) -> list[Episode]:
    """Draws random trajectories of 2 tokens and more, with advantages.

    Each has a prompt, and longer ones a turn in the middle that isn't trained on. loss_weight is
    that of a token mean over all of them.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        mask = np.arange(length) >= rng.integers(1, max(length // 2, 1) + 1)
        if length > 12:
            mask[length - 4 : length - 2] = False
        behavior = np.where(mask, -rng.gamma(2.0, 1.0, length) - lag * rng.random(length), 0)
        found.append(
            dict(
                token_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behavior_logp=behavior.astype(np.float32),
                versions=np.where(mask, rng.integers(0, 3, length), PROMPT_VERSION).astype(np.int32),
                advantage=np.where(mask, rng.normal(), 0).astype(np.float32),
                values=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
                returns=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
            )
        )
    total = sum(int(e["loss_mask"].sum()) for e in found)
    return [Episode({**e, "loss_weight": e["loss_mask"].astype(np.float32) / np.float32(total)}) for e in found]


def pack(items: Sequence[Episode], rows: Sequence[Sequence[int]], length: int, *, start: int = 0) -> Batch:
    """Packs episodes, by index, one after the other into each row, from column `start` on."""
    names = list(items[0].arrays)
    out = {name: np.zeros((len(rows), length), items[0].arrays[name].dtype) for name in names}
    segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    for row, members in enumerate(rows):
        at = start
        for number, index in enumerate(members, 1):
            end = at + len(items[index])
            for name in names:
                out[name][row, at:end] = items[index].arrays[name]
            segments[row, at:end], positions[row, at:end] = number, np.arange(end - at)
            at = end
    return Batch(segment_ids=segments, positions=positions, **out)


def unpack(
    array: np.ndarray, items: Sequence[Episode], rows: Sequence[Sequence[int]], *, start: int = 0
) -> dict[int, np.ndarray]:
    """Returns each episode's entries of an [R, T] array, by episode index; the inverse of `pack`."""
    found = {}
    for row, members in enumerate(rows):
        at = start
        for index in members:
            found[index] = array[row, at : at + len(items[index])]
            at += len(items[index])
    return found


def first_fit(items: Sequence[Episode], length: int) -> list[list[int]]:
    """Puts each episode into the first row that has room. Returns the indices per row."""
    rows: list[list[int]] = []
    for index, item in enumerate(items):
        for row in rows:
            if sum(len(items[i]) for i in row) + len(item) <= length:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


def halves(batch: Batch) -> list[Batch]:
    """Splits the rows into two minibatches; each keeps its loss weights."""
    middle = batch.shape[0] // 2
    cuts = (slice(0, middle), slice(middle, None))
    return [batch.replace(**{n: a[cut] for n, a in vars(batch).items() if a is not None}) for cut in cuts]


def untimed(means: dict[str, Mean]) -> dict[str, Mean]:
    """Removes the metrics of time and memory, which no two runs agree on."""
    return {name: mean for name, mean in means.items() if not name.startswith(("timeperf/", "perf/"))}


def assert_means_close(got: dict[str, Mean], want: dict[str, Mean], tolerance: float) -> None:
    """Asserts that metrics agree, except those of timing."""
    got, want = untimed(got), untimed(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(
            dataclasses.astuple(got[name]), dataclasses.astuple(want[name]), rtol=tolerance, atol=tolerance, err_msg=name
        )
