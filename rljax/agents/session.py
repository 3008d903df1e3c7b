"""Sessions: what an agent's requests are sampled with, and what is recorded of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.agents.errors import ApiError
from rljax.agents.export import trajectories
from rljax.agents.parameters import SamplingRequest
from rljax.agents.recording import Recording, Turn
from rljax.engine import Generator
from rljax.errors import SamplerError
from rljax.seeding import seed_for
from rljax.types import CONTEXT_FULL, Finish, SamplingParams, Trajectory, reward_number

MAX_SESSIONS = 4096
IDLE = 3600.0  # seconds after its last request until a session may be ended to make room


@dataclasses.dataclass(frozen=True)
class SamplingPolicy:
    """Sampling parameters of a session, and which of them a request may change.

    In training the log-probs of sampler and learner have to be of one distribution, so a request
    for another temperature, top_p or top_k is refused, unless `override` has the session's used.
    """

    params: SamplingParams  # what a request gets that names nothing; the stop ids always
    fixed: bool = True  # temperature, top_p and top_k are the session's, and max_new_tokens is a limit
    override: bool = False  # fixed ones are used whatever a request names

    def params_for(self, asked: SamplingRequest) -> SamplingParams:
        """Returns the parameters of a request.

        Raises:
          ApiError: a parameter is not the session's, or impossible.
        """
        own = self.params
        greedy = own.greedy if asked.temperature is None else asked.temperature == 0
        wanted: dict[str, float] = {
            "temperature": own.temperature if asked.temperature is None or greedy else asked.temperature,
            "top_p": own.top_p if asked.top_p is None else asked.top_p,
            "top_k": own.top_k if asked.top_k is None else asked.top_k,
        }
        if self.fixed:
            has = {name: getattr(own, name) for name in wanted}
            for name, value in wanted.items():
                if not self.override and (value != has[name] or (name == "temperature" and greedy != own.greedy)):
                    has_it = "argmax" if own.greedy else f"{name} {has[name]:g}"
                    raise ApiError(
                        f"{name}: this session samples with {has_it}, which the learner needs too (leave {name} out, set"
                        " gconfig, or rollout.workflow_args.override_sampling)",
                        param=name,
                        code="unsupported_value",
                    )
            wanted, greedy = has, own.greedy
        most = own.max_new_tokens if asked.max_tokens is None else asked.max_tokens
        if self.fixed and most > own.max_new_tokens:
            if not self.override:
                raise ApiError(
                    f"{asked.max_tokens_name}: at most {own.max_new_tokens} (gconfig.max_new_tokens), not {most}",
                    param=asked.max_tokens_name,
                    code="invalid_value",
                )
            most = own.max_new_tokens
        try:
            return SamplingParams(
                temperature=wanted["temperature"],
                top_p=wanted["top_p"],
                top_k=int(wanted["top_k"]),
                greedy=greedy,
                max_new_tokens=most,
                min_new_tokens=min(own.min_new_tokens if asked.min_tokens is None else asked.min_tokens, most),
                stop=tuple(dict.fromkeys([*own.stop, *asked.stop])),
                stop_token_ids=tuple(dict.fromkeys([*own.stop_token_ids, *asked.stop_token_ids])),
            )
        except ValueError as error:
            raise ApiError(str(error), code="invalid_value") from None


class Session:
    """One episode of an agent: its key, its sampler, and the recording of its requests."""

    def __init__(
        self,
        generator: Generator,
        policy: SamplingPolicy,
        seed: int,
        name: str,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        recorded: bool = True,
    ) -> None:
        """
        Args:
          template_kwargs: of the chat template, for requests that name no others.
          seed: completions are a function of it, of the weights and of the request.
          name: begins the ids of its requests at the sampler.
          recorded: False for requests of no session, which are only answered.
        """
        self.key = f"rljax-{secrets.token_urlsafe(24)}"
        self.generator, self.policy, self.seed, self.name, self.recorded = generator, policy, seed, name, recorded
        self.template_kwargs = dict(template_kwargs or {})
        self.recording = Recording()
        self.lost: SamplerError | None = None  # the last failure of the sampler
        self.full = False  # a request that came behind others left no room in the context
        self.used = time.monotonic()
        self._requests = 0
        self._prompts: Counter[bytes] = Counter()  # how often each was asked for
        self._running: set[asyncio.Task[object]] = set()

    def next_number(self) -> int:
        """Returns the number of the next request."""
        self.used = time.monotonic()
        self._requests += 1
        return self._requests - 1

    def seeds(self, prompt_ids: np.ndarray, asked: int | None, n: int) -> list[int]:
        """Returns the seeds of a request's n choices.

        They are hashes of session and prompt, so that they don't depend on the order in which
        sub-agents ask. The same prompt again gets others, unless the request names a seed. Requests
        of no session get the seed that they name, for the first choice.
        """
        if not self.recorded and asked is not None:
            return [(asked + choice) % 2**31 for choice in range(n)]
        digest, again = hashlib.blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=16), 0
        if asked is None:
            again = self._prompts[digest.digest()]
            self._prompts[digest.digest()] += n
        else:
            digest.update(str(asked).encode())
        return [seed_for(self.seed, digest.hexdigest(), again + choice) for choice in range(n)]

    def set_reward(self, value: object, turn_id: str | None = None, choice: int = 0) -> None:
        """Sets the reward of a turn, by default the last one.

        Raises:
          KeyError: there is no such turn.
          ValueError: it is no number that a reward may be.
        """
        self.recording.set_reward(reward_number("the reward", value), turn_id, choice)

    def found_full(self, turn: Turn | None) -> None:
        """Notes that a request left no room in the context; of a first one nothing is noted.

        Args:
          turn: the one that it goes on from, which ends cut; None for the last one.
        """
        if turn is None and self.recording.turns:
            turn = self.recording.turns[-1]
        if turn is not None:
            turn.finish, self.full = Finish.LENGTH, True

    def trajectories(self, style: str, discount: float, components: Mapping[str, float]) -> list[Trajectory]:
        """Returns the trajectories of the session, with its counts as components.

        rljax/agents/export.py says which. Raises ValueError if nothing was sampled.
        """
        counts = {
            "turns": float(len(self.recording.turns)),
            "prefix_breaks": float(self.recording.breaks),
            CONTEXT_FULL: float(self.full),
        }
        return trajectories(self.recording, style, discount, {**components, **counts})

    def track(self, task: asyncio.Task[object]) -> None:
        """Cancels a task with the session."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    @property
    def running(self) -> int:
        """Number of requests under way."""
        return len(self._running)

    def close(self) -> None:
        """Ends the requests under way."""
        for task in tuple(self._running):
            task.cancel()


class Sessions:
    """The open sessions by key."""

    def __init__(self, most: int | None = MAX_SESSIONS) -> None:
        self._most = most
        self._by_key: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Session | None:
        return self._by_key.get(key)

    def add(self, session: Session) -> None:
        """Opens a session; ends one that was long idle where there are too many.

        Raises ApiError if none is.
        """
        if self._most is not None and len(self._by_key) >= self._most:
            oldest = min(self._by_key.values(), key=lambda session: session.used)
            if oldest.running or time.monotonic() - oldest.used < IDLE:
                raise ApiError(f"{self._most} sessions are open (end some)", code="rate_limit_exceeded", status=429)
            self.end(oldest)
        self._by_key[session.key] = session

    def end(self, session: Session) -> None:
        """Closes a session: its key is no longer known."""
        self._by_key.pop(session.key, None)
        session.close()

    def close(self) -> None:
        """Ends all sessions."""
        for session in tuple(self._by_key.values()):
            self.end(session)
