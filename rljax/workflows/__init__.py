"""Workflows: definitions of an episode, named by `rollout.workflow`.

A workflow is a class whose constructor takes `tokenizer`, `rewards` and, as keywords,
`rollout.workflow_args`; the interface is rljax/rollout/workflow.py.
"""

from rljax.workflows.build import WORKFLOWS, build_workflow, check_prompts, sampling_params, scores_by_rewards, tools_of
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
    "tools_of",
]
