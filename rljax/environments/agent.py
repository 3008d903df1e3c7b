"""An agent that plays the environment of its prompt over OpenAI's API.

    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "rljax.environments.agent:play"

The workflow "environment" plays the same games without the API, and takes less time.
"""

from __future__ import annotations

from typing import Any

from rljax.environments.build import Source
from rljax.environments.play import Play, numbers_of
from rljax.types import Prompt


async def play(client: Any, model: str, prompt: Prompt) -> dict[str, float]:
    """Plays an episode, and returns the sum of its rewards.

    It ends when the environment says so, with a reply that was cut short, or where the context has
    no room for another.
    """
    from openai import BadRequestError

    messages, total = [dict(message) for message in prompt.messages], 0.0
    earned: dict[str, float] = {}
    async with Play(Source.of(prompt.fields, f"prompt {prompt.uid}"), timeout=60.0) as game:
        await game.reset()
        while True:
            try:
                reply = await client.chat.completions.create(model=model, messages=messages)
            except BadRequestError as error:
                if error.code != "context_length_exceeded" or not earned:
                    raise
                return earned
            choice = reply.choices[0]
            step = await game.step(choice.message.content)
            total += step.reward
            earned = {"reward": total, **numbers_of(step.info)}
            if step.terminated or step.truncated or choice.finish_reason != "stop":
                return earned
            answer = [{"role": "assistant", "content": choice.message.content}, *step.observation]
            messages += [dict(message) for message in answer]
