"""Interface of an episode, which users implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rljax.engine import Generator
from rljax.types import Prompt, SamplingParams, Trajectory


class Workflow(Protocol):
    """Turns one prompt into one trajectory, or into several that are the parts of one episode.

    The loop runs `gconfig.n_samples` episodes per prompt, concurrently.

    Example:

        class Arithmetic:
            async def episode(self, generator, prompt, params, seed):
                prompt_ids = self.tokenizer.encode_prompt(prompt)
                request = Request(f"{prompt.uid}#{seed}", prompt_ids, params, seed)
                completion = await generator.generate(request)
                text = self.tokenizer.decode(completion.token_ids)
                reward = float(text == prompt.fields["answer"])
                return trajectory_of(prompt_ids, completion, reward, {"exact": reward})
    """

    async def episode(
        self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int
    ) -> Trajectory | Sequence[Trajectory] | None:
        """Runs one episode. Returns None to reject the sample.

        An episode of several parts counts once in the statistics of its group and in the metrics,
        with the mean of the parts' rewards; each part is trained on with its own reward.

        Raises:
          EpisodeError: the episode failed. Any other exception counts as `workflow_error`.
        """
        ...
