"""What an episode is: the interface that users implement."""

from __future__ import annotations

from typing import Protocol

from rljax.engine import Generator
from rljax.types import Prompt, SamplingParams, Trajectory


class Workflow(Protocol):
    """Turns one prompt into one trajectory. The loop calls it `gconfig.n_samples` times a prompt,
    all at once.

    Example:

        class Arithmetic:
            async def episode(self, generator, prompt, params, seed):
                prompt_ids = self.tokenizer.apply_chat_template(prompt.messages)
                completion = await generator.generate(Request(f"{prompt.uid}#{seed}", prompt_ids, params, seed))
                reward = float(self.tokenizer.decode(completion.token_ids) == prompt.fields["answer"])
                return trajectory_of(prompt_ids, completion, reward, {"exact": reward})
    """

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        """None rejects the sample.

        Raises EpisodeError when it failed; any other exception counts as `workflow_error`.
        """
        ...
