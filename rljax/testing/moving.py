"""Steps of a learner on one kind of run, the same for every engine: for runs that move."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax.batching.batch import Batch
from rljax.checkpoints.portable import COUNTS
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import Learner, PortableState, find_plugin
from rljax.metrics.mean import Mean
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack, untimed
from rljax.testing.models import VOCABULARY

SPECIAL = 3  # ids below it are not characters

# Adam divides by sqrt(nu) + eps. At 1e-2 a gradient's rounding moves a parameter by at most lr / eps times itself, at 1e-8 by
# lr, however small it was; metrics hardly see the difference, and parameters do (docs/moving.md).
SMOOTH = {"actor.optimizer.eps": 1e-2, "warmup.optimizer.eps": 1e-2, "critic.optimizer.eps": 1e-2}
SCHEDULE = {
    "actor.optimizer.lr_scheduler_type": "linear",
    "actor.optimizer.warmup_steps_proportion": 0.3,
    "total_train_steps": 8,
}
WARMUP = {"warmup.steps": 4, "warmup.optimizer.lr_scheduler_type": "cosine", "actor.kl_ctl": 0.1}
CRITIC = {"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1, "warmup.steps": 2}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run: its settings, and the steps before and after it moves.

    Steps are (supervised steps, training steps).
    """

    settings: Mapping[str, Any]
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def config(self) -> Config:
        return config_of(**(SMOOTH | SCHEDULE | dict(self.settings)))


KINDS = {
    "all parameters": Kind({}, (0, 2), (0, 3)),
    "adapters": Kind({"actor.lora.rank": 4, "actor.lora.alpha": 8.0, "actor.kl_ctl": 0.1}, (0, 2), (0, 3)),
    "before its first step": Kind(WARMUP, (0, 0), (2, 0)),
    "in the warm-up": Kind(WARMUP, (2, 0), (2, 1)),
    "critic and reference": Kind(CRITIC, (2, 2), (0, 2)),
    "adapters with a critic": Kind({"actor.lora.rank": 4, "actor.lora.alpha": 8.0} | CRITIC, (2, 1), (0, 2)),
}


def make(engine: str, kind: Kind, model: Path) -> Learner:
    return find_plugin(engine).make_learner(kind.config, Pool(engine), model)


def go(learner: Any, kind: Kind, steps: tuple[int, int], *, seed: int = 0) -> list[dict[str, Mean]]:
    """Takes supervised steps, then training steps, on batches that follow from the seed.

    Returns the metrics of each.
    """
    supervised, training = steps
    found = [learner.update_supervised(_batch(seed + step)) for step in range(supervised)]
    for step in range(training):
        batch, actor = _batch(seed + 100 + step), kind.config.actor
        batch = batch.replace(proximal_logp=learner.score(batch))
        if actor.kl_ctl:
            batch = batch.replace(reference_logp=learner.score_reference(batch))
        means = learner.update(batch)
        if actor.adv_estimator == "gae":
            means |= learner.update_critic(batch.replace(values=learner.values(batch)))
        found.append(untimed(means))
    return found


def _batch(seed: int) -> Batch:
    """Returns a batch with other tokens in the same shape, so that a program is compiled once."""
    items = episodes(8)
    batch = pack(items, first_fit(items, 64), 64)
    shifted = SPECIAL + (batch.token_ids - SPECIAL + 11 * seed) % (VOCABULARY - SPECIAL)
    return batch.replace(token_ids=np.where(batch.segment_ids > 0, shifted, batch.token_ids).astype(np.int32))


def flat(state: PortableState) -> dict[str, np.ndarray]:
    return {f"{part} {name}": np.asarray(array) for part, arrays in state.items() for name, array in arrays.items()}


def assert_equal(one: PortableState, other: PortableState) -> None:
    """Asserts that two states are equal to the bit, and that no part is all zeros."""
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert name.startswith(COUNTS) or a[name].shape == b[name].shape
    for part in set(one) - {COUNTS}:
        assert any(np.asarray(array).any() for array in one[part].values()), part
