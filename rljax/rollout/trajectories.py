"""Makes trajectories from token ids: one completion, several turns, or labeled targets.

Text is never tokenized again: a trajectory holds the ids that the sampler returned, and the next
request begins with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rljax.metrics.mean import Mean, merge
from rljax.types import PROMPT_VERSION, Completion, Finish, Trajectory, reward_number


class Episode:
    """Episode in progress: tokens that are given alternate with completions that are sampled.

    Example:
        episode = Episode(prompt_ids)
        completion = await sampler.generate(Request("0/17#3", episode.token_ids, params, seed))
        episode.sampled(completion)
        episode.given(tokenizer.next_turn(messages, completion.token_ids[-1]))
        ...
        episode.trajectory(reward=1.0, components={"exact": 1.0})
    """

    def __init__(self, prompt_ids: Sequence[int] | np.ndarray, pictures: Sequence[str] = ()) -> None:
        """Begins with a prompt, and the data URLs of the pictures in it."""
        if not len(prompt_ids):
            raise ValueError("a prompt has at least one token")
        self._pictures = tuple(pictures)
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._logps: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._finish: Finish | None = None
        self.given(prompt_ids)

    @property
    def token_ids(self) -> np.ndarray:
        """All token ids so far, [T] int32: the prompt of the next request."""
        return np.concatenate(self._ids)

    @property
    def last_sampled(self) -> int:
        """Id of the last token so far, if it was sampled; else -1."""
        return int(self._ids[-1][-1]) if self._masks[-1].any() else -1

    def given(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Appends tokens that the policy did not sample. They are not trained on."""
        length = len(token_ids)
        self._add(token_ids, np.zeros(length), np.full(length, PROMPT_VERSION), trained=False)

    def sampled(self, completion: Completion) -> None:
        """Appends a completion. All its tokens are trained on, including an EOS at its end."""
        self._add(completion.token_ids, completion.logp, completion.versions, trained=True)
        self._finish = completion.finish

    def cut(self) -> None:
        """Ends the episode behind its last completion, with finish `length`: no further turn fits."""
        self._finish = Finish.LENGTH

    def trajectory(self, reward: float, components: Mapping[str, float]) -> Trajectory:
        """Returns the episode so far. Raises ValueError before the first completion."""
        if self._finish is None:
            raise ValueError("nothing was sampled yet")
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=np.concatenate(self._masks),
            behavior_logp=np.concatenate(self._logps),
            versions=np.concatenate(self._versions),
            reward=reward,
            components=dict(components),
            finish=self._finish,
            pictures=self._pictures,
        )

    def _add(self, ids: Sequence[int] | np.ndarray, logp: np.ndarray, versions: np.ndarray, *, trained: bool) -> None:
        self._ids.append(np.asarray(ids, np.int32).reshape(-1))
        self._masks.append(np.full(len(ids), trained))
        self._logps.append(np.asarray(logp, np.float32))
        self._versions.append(np.asarray(versions, np.int32))


def trajectory_of(
    prompt_ids: Sequence[int] | np.ndarray,
    completion: Completion,
    reward: float,
    components: Mapping[str, float],
    pictures: Sequence[str] = (),
) -> Trajectory:
    """Returns the trajectory of a prompt and one completion."""
    episode = Episode(prompt_ids, pictures)
    episode.sampled(completion)
    return episode.trajectory(reward, components)


def with_numbers(trajectory: Trajectory) -> Trajectory:
    """Returns a trajectory with its reward and components as floats.

    Raises ValueError for one that is no number that a reward may be (`reward_number`).
    """
    reward = reward_number("the reward", trajectory.reward)
    components = {str(name): reward_number(f"component {name!r}", value) for name, value in trajectory.components.items()}
    return dataclasses.replace(trajectory, reward=reward, components=components)


def check_token_ids(trajectories: Iterable[Trajectory], vocab_size: int | None) -> None:
    """Raises ValueError for a token id that is not in [0, vocab_size); None checks nothing."""
    for trajectory in trajectories:
        if vocab_size is None or not len(trajectory):
            continue
        low, high = int(trajectory.token_ids.min()), int(trajectory.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}")


def supervised(prompt_ids: Sequence[int], target_ids: Sequence[int]) -> Trajectory:
    """Returns a trajectory of a prompt and the target ids to learn.

    Its versions are PROMPT_VERSION and its log-probs 0, because the policy sampled none of it.
    """
    ids = np.array([*prompt_ids, *target_ids], np.int32)
    return supervised_turns(ids, np.arange(len(ids)) >= len(prompt_ids))


def supervised_turns(token_ids: np.ndarray, learned: np.ndarray) -> Trajectory:
    """Returns a trajectory of a labeled conversation, as `supervised` does.

    Args:
      token_ids: [T] int32.
      learned: [T] bool: the tokens to learn; token 0 has no context and is none.
    """
    ids = np.asarray(token_ids, np.int32)
    return Trajectory(
        token_ids=ids,
        loss_mask=np.asarray(learned, bool) & (np.arange(len(ids)) > 0),
        behavior_logp=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), PROMPT_VERSION, np.int32),
        reward=0.0,
        components={},
        finish=Finish.STOP,
    )


def no_eos_ratio(trajectories: Iterable[Trajectory]) -> Mean:
    """Returns the share of episodes whose last completion was cut (`length` or `abort`)."""
    cut = [float(trajectory.finish in (Finish.LENGTH, Finish.ABORT)) for trajectory in trajectories]
    return Mean(sum(cut), len(cut))


def reward_components(
    trajectories: Sequence[Trajectory], prefix: str = "reward", weights: Sequence[float] | np.ndarray | None = None
) -> dict[str, Mean]:
    """Returns the mean of each reward component over the trajectories that have it.

    Args:
      weights: of the trajectories, as `episode_weights` gives them; None: one each.
    """
    weights = [1.0] * len(trajectories) if weights is None else weights
    return merge(
        {f"{prefix}/{name}": Mean.weighted([value], [weight])}
        for t, weight in zip(trajectories, weights, strict=True)
        for name, value in t.components.items()
    )
