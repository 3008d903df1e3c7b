"""Average lengths of a plan, held against what an episode of the run may have."""

from __future__ import annotations

from rljax import engine
from rljax.config.allocation import Allocation
from rljax.config.schema import Config
from rljax.errors import UserError


def check_lengths(config: Config, pools: Allocation, prompt: int | None, completion: int | None) -> None:
    """Checks --prompt_tokens and --completion_tokens, by the limits that a run has.

    Args:
      prompt, completion: tokens of an average one; None: not given.

    Raises UserError for lengths that no episode can have.
    """
    sft, longest, limit = config.actor.loss == "sft", config.gconfig.max_new_tokens, config.train_dataset.max_length
    most, why = engine.room_for_example(config) if sft else engine.room_for_prompt(config, pools)
    if prompt is not None and limit is not None and prompt > limit:
        raise UserError(f"--prompt_tokens: {prompt} is more than {limit}: train_dataset.max_length={limit} leaves it out")
    if prompt is not None and prompt > most:
        raise UserError(f"--prompt_tokens: {prompt} is more than {most}: {why}")
    if completion is not None and completion > longest and not sft:
        raise UserError(f"--completion_tokens: {completion} is more than gconfig.max_new_tokens={longest}")
    room, both = _room(config, pools), (prompt or 1) + (completion or 1)
    if both > room:
        if completion is None:
            raise UserError(f"--prompt_tokens: {prompt} leaves no room for a completion in the {room} of an episode")
        raise UserError(f"--completion_tokens: {both} with a prompt of {prompt or 1}, and an episode has room for {room}")


def _room(config: Config, pools: Allocation) -> int:
    """Returns the most tokens of an episode: a row's, and the sampler's context if it samples."""
    row, sampler = config.actor.mb_spec.max_tokens_per_row, pools.sampler
    context = None if sampler is None else engine.find_plugin(sampler.engine).context_length(config)
    return row if context is None or config.actor.loss == "sft" else min(row, context)
