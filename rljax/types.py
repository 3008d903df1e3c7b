"""Types that samplers, workflows, the buffer and learners share. Plain numpy, no framework.

numpy is imported when it is used: a reward process, of which a run starts several, has no arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PROMPT_VERSION = -1  # stamped on tokens that the policy did not sample
CONTEXT_FULL = "context_full"  # component of several turns: 1 where the context had no room for a further one
LARGEST_REWARD = (2 - 2.0**-23) * 2.0**127  # float32's largest number, as advantages are float32


class Finish(enum.StrEnum):
    """Reason for which a completion ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    ABORT = "abort"  # the request was aborted; the tokens so far are valid
    TOOL_CALLS = "tool_calls"


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one completion.

    Example: SamplingParams(max_new_tokens=64, temperature=0.6, top_p=0.95, stop=("\\n",))
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0  # > 0; for argmax set `greedy`
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: no limit
    greedy: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the EOS ids included

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must lie in [0, {self.max_new_tokens}], not {self.min_new_tokens}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, not {self.temperature} (greedy=True for argmax)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no limit) or positive, not {self.top_k}")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every completion before it begins")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Prompt tokens and sampling parameters sent to a sampler.

    Example: Request(id="0/17#3", prompt_ids=[9, 4, 7], params=SamplingParams(8), seed=1234)
    """

    id: str  # unique among the requests in flight
    prompt_ids: np.ndarray  # [P] int32, P >= 1
    params: SamplingParams
    seed: int  # the completion is a function of weights, prompt, params and seed
    pictures: tuple[str, ...] = ()  # data URLs, in order; prompt_ids has the tokens of each
    marked_text: str = ""  # the prompt with a mark per picture, as processors take it; only with pictures


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that a sampler returns for one request.

    Example: Completion(token_ids=[42, 7, 2], logp=[-0.1, -2.3, -0.0], versions=[5, 5, 6],
    finish=Finish.STOP)
    """

    token_ids: np.ndarray  # [T] int32; includes the stop id that ended it, but nothing after a stop string
    logp: np.ndarray  # [T] float32, nats, under the distribution that the tokens were sampled from
    versions: np.ndarray  # [T] int32; rises within a completion when weights are swapped under it
    finish: Finish

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logp) == len(self.versions):
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens has {len(self.logp)} log-probs and {len(self.versions)} versions"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of a streamed completion. The pieces of one request, joined, are its completion.

    Example: Piece(token_ids=[42, 7], logp=[-0.1, -2.3], versions=[5, 5], finish=None)
    """

    token_ids: np.ndarray  # [T] int32, T >= 0
    logp: np.ndarray  # [T] float32, nats
    versions: np.ndarray  # [T] int32
    finish: Finish | None  # set on the last piece only


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One example as a workflow sees it.

    Messages are as rljax/chat/messages.py describes them.

    Example:

        Prompt(uid="0/17", messages=({"role": "user", "content": "3+4="},), fields={"answer": "7"})
    """

    uid: str  # "<epoch>/<index in the dataset>": stable over restarts, unique in a run
    messages: tuple[Mapping[str, Any], ...]  # chat turns; an assistant's at the end is one to be continued
    fields: Mapping[str, Any]  # data for the reward; JSON values only
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool definitions
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # over the config's
    reply: tuple[Mapping[str, Any], ...] = ()  # turns that the record has behind the prompt, for supervised training


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """Prompt and completion(s) of one episode. Entry t of each array belongs to token t itself.

    An episode may consist of several trajectories, its parts, as when two agents talk side by side.

    Example:

        Trajectory(
            token_ids=[9, 4, 7, 2],
            loss_mask=[0, 0, 1, 1],
            behavior_logp=[0, 0, -0.1, -0.4],
            versions=[-1, -1, 3, 3],
            reward=1.0,
            components={"exact": 1.0},
            finish=Finish.STOP,
        )
    """

    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool: sampled by the policy and trained on; False on prompt and tool tokens
    behavior_logp: np.ndarray  # [T] float32, nats; 0 on tokens that the policy did not sample
    versions: np.ndarray  # [T] int32; PROMPT_VERSION on tokens that the policy did not sample
    reward: float  # of the whole episode, before shaping
    components: Mapping[str, float]  # reward components by name, logged separately
    finish: Finish  # of the last completion
    episode: int | None = None  # the parts of one episode of a group have the same number; None: an episode by itself
    pictures: tuple[str, ...] = ()  # data URLs, in order; token_ids has the tokens of each

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "behavior_logp", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {length} tokens")
        if length and self.loss_mask[0]:
            raise ValueError("token 0 has no context and cannot be trained on")

    def __len__(self) -> int:
        return len(self.token_ids)


def reward_number(what: str, value: object) -> float:
    """Converts a reward, or a component of one, to a float. This is the rule for all of them.

    Rewards come from reward functions, workflows, agents and environments.

    Example: reward_number("the reward", np.float32(0.5)) == 0.5

    Args:
      what: begins the error: "the reward", or "component 'format'".

    Raises:
      ValueError: it is no number, not finite, or beyond LARGEST_REWARD.
    """
    remedy = "raise Rejected in an episode that has no reward; leave out a component that has no value"
    if isinstance(value, str | bytes) or not (isinstance(value, numbers.Real) or hasattr(value, "__float__")):
        raise ValueError(f"{what} is {type(value).__name__}, not a number ({remedy})")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    except (TypeError, ValueError) as error:  # an array of several
        raise ValueError(f"{what} is {type(value).__name__}, not a number: {error}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number ({remedy})")
    if abs(number) > LARGEST_REWARD:
        largest = f"{LARGEST_REWARD:.2g}"
        raise ValueError(f"{what} is {number:.4g}, and training takes no more than {largest}, as float32 (scale or clip it)")
    return number


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt.

    Fewer than n_samples episodes when some failed or were rejected.
    """

    uid: str  # of the prompt
    trajectories: tuple[Trajectory, ...]

    def episodes(self) -> tuple[tuple[Trajectory, ...], ...]:
        """Returns the trajectories of each episode."""
        return episodes_of(self.trajectories)


def episodes_of(trajectories: Sequence[Trajectory]) -> tuple[tuple[Trajectory, ...], ...]:
    """Returns the trajectories of one group by episode, in the order of their first parts."""
    found: dict[object, list[Trajectory]] = {}
    for index, trajectory in enumerate(trajectories):
        key = ("alone", index) if trajectory.episode is None else trajectory.episode
        found.setdefault(key, []).append(trajectory)
    return tuple(map(tuple, found.values()))


def episode_rewards(trajectories: Sequence[Trajectory]) -> tuple[float, ...]:
    """Returns the reward of each episode of one group: the mean over its parts."""
    return tuple(sum(part.reward for part in parts) / len(parts) for parts in episodes_of(trajectories))


def episode_ids(groups: Sequence[Group]) -> np.ndarray:
    """Numbers the episodes of all groups, and returns the number of each trajectory, [N] int64."""
    import numpy as np

    found: dict[tuple[int, object], int] = {}
    ids = []
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            key = ("alone", index) if trajectory.episode is None else trajectory.episode
            ids.append(found.setdefault((number, key), len(found)))
    return np.array(ids, np.int64)


def episode_weights(groups: Sequence[Group]) -> np.ndarray:
    """Returns one over the number of parts of each trajectory's episode, [N] float64.

    With these weights an episode counts once in a mean over trajectories.
    """
    import numpy as np

    ids = episode_ids(groups)
    return 1.0 / np.bincount(ids)[ids] if len(ids) else np.zeros(0)
