"""Trajectories of a session's recording.

concat       one trajectory per branch of the tree, from its first prompt to its last completion
individual   one trajectory per turn: its prompt, and its completion

Either way each sampled token is trained on once. Where branches share turns, those are trained on
in the branch with the latest turn, and are context in the others.

The reward of a turn is its own, plus the discount times the reward of the next turn of the session:

    r_i = own_i + discount * r_{i+1}

The reward of a branch is that of the first turn that is trained on in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rljax.agents.recording import Recording, Turn
from rljax.types import PROMPT_VERSION, Trajectory


def discounted(own: Sequence[float | None], discount: float) -> list[float]:
    """Returns the rewards of turns in order, each with the discounted reward of those after it."""
    rewards: list[float] = []
    for value in reversed(own):
        rewards.append((value or 0.0) + discount * (rewards[-1] if rewards else 0.0))
    return rewards[::-1]


def trajectories(recording: Recording, style: str, discount: float, components: Mapping[str, float]) -> list[Trajectory]:
    """Returns the trajectories of a session, at least one.

    Args:
      style: "concat" or "individual".
      components: of the episode's reward; each of its trajectories has them.

    Raises:
      ValueError: nothing was sampled.
    """
    turns = recording.turns
    if not turns:
        raise ValueError("nothing was sampled")
    rewards = dict(zip(turns, discounted([turn.reward for turn in turns], discount), strict=True))
    paths = [([turn], [turn]) for turn in turns] if style == "individual" else _branches(turns)
    return [_trajectory(path[-1], trained, rewards[trained[0]], components) for path, trained in paths]


def _branches(turns: Sequence[Turn]) -> list[tuple[list[Turn], list[Turn]]]:
    """Returns each branch of the tree: its turns, and those of them that are trained on in it."""
    parents = {turn.parent for turn in turns}
    taken: set[Turn] = set()
    found = []
    for leaf in reversed([turn for turn in turns if turn not in parents]):  # the latest first: it has the shared turns
        path: list[Turn] = []
        turn: Turn | None = leaf
        while turn is not None:
            path.insert(0, turn)
            turn = turn.parent
        found.append((path, [turn for turn in path if turn not in taken]))
        taken |= set(path)
    return found[::-1]


def _trajectory(last: Turn, trained: Sequence[Turn], reward: float, components: Mapping[str, float]) -> Trajectory:
    token_ids = last.token_ids
    mask = np.zeros(len(token_ids), bool)
    logp = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), PROMPT_VERSION, np.int32)
    for turn in trained:
        span = slice(len(turn.prompt_ids), len(turn.token_ids))
        mask[span], logp[span], versions[span] = True, turn.completion.logp, turn.completion.versions
    return Trajectory(token_ids, mask, logp, versions, reward, dict(components), last.finish)
