"""Workflows: definitions of an episode, named by `rollout.workflow`.

A workflow is a class whose constructor takes `tokenizer`, `rewards` and, as keywords,
`rollout.workflow_args`; the interface is rljax/rollout/workflow.py.

build.py        workflow and sampling parameters that a config names
rlvr.py         one turn with a verifiable reward
multi_turn.py   several turns, with feedback on a wrong answer
tool_use.py     tool calls that are answered
environment.py  an environment's episode
agent.py        an agent that talks to an OpenAI-compatible endpoint
turns.py        requests of an episode of several turns
filters.py      which groups are trained on
evaluations.py  the workflow on validation sets; scored.py, its results
"""

from rljax.workflows.build import (
    WORKFLOWS,
    build_workflow,
    check_prompts,
    sampling_params,
    scores_by_rewards,
    tokens_between,
    tools_of,
    workflow_of,
)
from rljax.workflows.filters import FILTERS, find_filter
from rljax.workflows.rlvr import complete, request_of

__all__ = [
    "FILTERS",
    "WORKFLOWS",
    "build_workflow",
    "check_prompts",
    "complete",
    "find_filter",
    "request_of",
    "sampling_params",
    "scores_by_rewards",
    "tokens_between",
    "tools_of",
    "workflow_of",
]
