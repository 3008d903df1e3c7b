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

    It ends when the environment says so, or with a reply that was cut short.
    """
    messages, total = [dict(message) for message in prompt.messages], 0.0
    async with Play(Source.of(prompt.fields, f"prompt {prompt.uid}"), timeout=60.0) as game:
        await game.reset()
        while True:
            reply = await client.chat.completions.create(model=model, messages=messages)
            choice = reply.choices[0]
            step = await game.step(choice.message.content)
            total += step.reward
            if step.terminated or step.truncated or choice.finish_reason != "stop":
                return {"reward": total, **numbers_of(step.info)}
            answer = [{"role": "assistant", "content": choice.message.content}, *step.observation]
            messages += [dict(message) for message in answer]
