"""Evaluations of a config: its workflow on its validation sets, sampled as `evaluator` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rljax.config.schema import Config
from rljax.data.held_out import HeldOut
from rljax.evaluation.protocol import protocol_of
from rljax.hf.tokenizer import Tokenizer
from rljax.rollout.evaluation import Evaluation
from rljax.rollout.workflow import Workflow
from rljax.types import SamplingParams
from rljax.workflows.build import sampling_params


def evaluation_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Returns the sampling parameters of evaluations: those of `evaluator`, else of `gconfig`."""
    judge = config.evaluator
    return dataclasses.replace(
        sampling_params(config.gconfig, tokenizer),
        greedy=judge.greedy,
        temperature=judge.temperature,
        top_p=judge.top_p,
        top_k=judge.top_k,
        max_new_tokens=judge.max_new_tokens or config.gconfig.max_new_tokens,
    )


def evaluations_of(config: Config, sets: Sequence[HeldOut], workflow: Workflow, tokenizer: Tokenizer) -> list[Evaluation]:
    """Returns the evaluation on each set, in order, with its protocol."""
    params = evaluation_params(config, tokenizer)
    return [
        Evaluation(
            prompts=each.prompts,
            workflow=workflow,
            params=params,
            n_samples=config.evaluator.n_samples,
            name=each.name,
            protocol=protocol_of(config, each.dataset, prompts=each.prompts, data=each.identity, tokenizer=tokenizer),
        )
        for each in sets
    ]
