"""Environments of Gymnasium, whose observations and actions become text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.config import arguments, registry
from rljax.environments.interface import Step
from rljax.errors import UserError

REMEDY = "pip install 'rljax[gymnasium]'"


class Gymnasium:
    """An environment of Gymnasium by its id.

    Observations are shown as text of their numbers, or as what the environment renders (render_mode
    "ansi"), or by a function of the user's. An action is the text itself for a Text space, a number
    or one of `actions` for a Discrete space, else a JSON value. What is no action of the space does
    not reach the environment: the policy is told, and gets `illegal_reward`.

    Args:
      id: as for gymnasium.make, "module:Name-v0" to import the module first.
      make: further arguments of gymnasium.make.
      instructions: text before the first observation.
      actions: words for the actions of a Discrete space, in their order.
      render: show what the environment renders instead of its observations.
      observe: "package.module:function" of an observation that returns its text.
      act: "package.module:function" of an action's text that returns the action, or raises
        ValueError.
      illegal_reward: reward of an illegal action.

    Raises:
      UserError: Gymnasium is missing, or has no such environment.
    """

    def __init__(
        self,
        id: str,
        *,
        make: Mapping[str, Any] = {},
        instructions: str = "",
        actions: Sequence[str] = (),
        render: bool = False,
        observe: str | None = None,
        act: str | None = None,
        illegal_reward: float = 0.0,
    ) -> None:
        arguments.check("gymnasium", illegal_reward=(illegal_reward, arguments.FINITE))
        try:
            import gymnasium
        except ImportError as error:
            raise UserError(f"gymnasium: {error} ({REMEDY})") from error
        try:
            self._inner = gymnasium.make(id, **{**make, **({"render_mode": "ansi"} if render else {})})
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise UserError(f"gymnasium: {id}: {' '.join(str(error).split())}") from error
        self._render, self._instructions, self._illegal_reward = render, instructions, illegal_reward
        self._observe: Callable[[Any], str] = _text_of if observe is None else _function(observe, "observe", "observation")
        self._act: Callable[[str], Any] = self._parse if act is None else _function(act, "act", "text")
        self._actions = list(actions)
        size = getattr(self._inner.action_space, "n", None)
        if actions and len(actions) != size:
            raise UserError(f"gymnasium: {id}: {len(actions)} words for {size} actions")

    def reset(self, seed: int, **options: Any) -> str:
        """Resets with the seed, and with the fields as Gymnasium's options."""
        observation, _ = self._inner.reset(seed=seed, options=options or None)
        self._inner.action_space.seed(seed)
        return "\n".join(filter(None, (self._instructions, self._show(observation))))

    def step(self, action: str) -> Step:
        try:
            chosen = self._act(action)
            if not self._inner.action_space.contains(chosen):
                raise ValueError("no action of the space")
        except ValueError as error:  # json's errors among them
            space = ", ".join(self._actions) or str(self._inner.action_space)
            return Step(f"illegal action ({error}): {space}", self._illegal_reward, False, False, {"illegal": True})
        observation, reward, terminated, truncated, info = self._inner.step(chosen)
        return Step(self._show(observation), float(reward), bool(terminated), bool(truncated), info)

    def close(self) -> None:
        self._inner.close()

    def random_action(self, generator: random.Random) -> str:
        space = self._inner.action_space
        space.seed(generator.randrange(2**31))
        sample = space.sample()
        return self._actions[int(sample)] if self._actions else _text_of(sample)

    def _show(self, observation: Any) -> str:
        return str(self._inner.render()) if self._render else self._observe(observation)

    def _parse(self, text: str) -> Any:
        import gymnasium

        space, text = self._inner.action_space, text.strip()
        if isinstance(space, gymnasium.spaces.Text):
            return text
        if self._actions:
            if text not in self._actions:
                raise ValueError(f"no such action: {text[:40]!r}")
            return self._actions.index(text) + int(getattr(space, "start", 0))
        value = json.loads(text)
        return np.asarray(value, space.dtype) if isinstance(value, list) else value


def _text_of(value: Any) -> str:
    """Returns an observation as text: of a Text space as it is, of others as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))


def _function(name: str, argument: str, takes: str) -> Callable[..., Any]:
    found: Callable[..., Any] = registry.resolve(f"gymnasium: {argument}", name, {}, "function", (takes,))
    return found
