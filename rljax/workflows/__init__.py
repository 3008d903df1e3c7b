"""Workflows: what an episode is. Named by `rollout.workflow`; the interface is
rljax/rollout/workflow.py.

A workflow is a class whose constructor takes `tokenizer`, `rewards` and, as keywords,
`rollout.workflow_args`.
"""

from rljax.workflows.build import WORKFLOWS, build_workflow, sampling_params
from rljax.workflows.filters import FILTERS, find_filter

__all__ = ["FILTERS", "WORKFLOWS", "build_workflow", "find_filter", "sampling_params"]
