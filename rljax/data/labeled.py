"""Labeled examples for supervised training: the prompt's chat template, then answer and EOS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.rollout.trajectories import supervised
from rljax.types import Prompt, Trajectory


def labeled_trajectory(prompt: Prompt, tokenizer: Tokenizer, field: str = "answer") -> Trajectory:
    """Makes a supervised trajectory: the prompt, then the text of a field and EOS.

    Only the field's text and the EOS are trained on. Raises UserError if the prompt has no such
    field.
    """
    if field not in prompt.fields:
        raise UserError(
            f"warmup.field: prompt {prompt.uid} has no field {field!r} to train on (its fields: {', '.join(prompt.fields)})"
        )
    prompt_ids = tokenizer.apply_chat_template(prompt.messages)
    target_ids = [*tokenizer.encode(str(prompt.fields[field])), tokenizer.eos_token_id]
    return supervised(prompt_ids, target_ids)


def labeled(prompts: Iterable[Prompt], tokenizer: Tokenizer, field: str = "answer") -> Iterator[Trajectory]:
    """Yields trajectories for supervised training; endless if the prompts are."""
    return (labeled_trajectory(prompt, tokenizer, field) for prompt in prompts)
