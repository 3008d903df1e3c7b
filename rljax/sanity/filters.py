"""Trial of `rollout.should_accept_fn` on a made-up group, before any is sampled."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np

from rljax.rollout.producer import Filter
from rljax.sanity.findings import Finding, Severity
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory

PART = "rollout.should_accept_fn"


async def check_filter(accept: Filter, n_samples: int) -> list[Finding]:
    """Calls a filter with a group whose rewards are 1, 0, 1, ...; plain and async ones alike."""
    group = Group("0/0", tuple(_trajectory(float(i % 2 == 0)) for i in range(n_samples)))
    try:
        answer = accept(group)
        answer = await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # users' code
        reason = " ".join(str(error).split())
        line = f"it raises on a made-up group of {n_samples}: {type(error).__name__}: {reason}"
        return [Finding(Severity.WARNING, PART, line, "right if it reads components that the made-up group has not")]
    return list(_of_answer(answer, n_samples))


def _of_answer(answer: object, n_samples: int) -> Iterator[Finding]:
    if not isinstance(answer, bool | np.bool_):
        line = f"it returns {type(answer).__name__} for a made-up group, not a bool"
        yield Finding(Severity.ERROR, PART, line, "True to train on the group, False to reject it")
    elif not answer and n_samples > 1:
        yield Finding(Severity.NOTE, PART, f"it rejects a made-up group of {n_samples} with rewards 1, 0, 1, ...")


def _trajectory(reward: float) -> Trajectory:
    """Makes a trajectory of one prompt token and one that was sampled."""
    mask = np.array([False, True])
    return Trajectory(
        token_ids=np.zeros(2, np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, PROMPT_VERSION).astype(np.int32),
        reward=reward,
        components={},
        finish=Finish.STOP,
    )
