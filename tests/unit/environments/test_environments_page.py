"""docs/environments.md runs as it stands, and names what there is."""

import inspect
import re
from pathlib import Path

import pytest

from rljax.environments import ENVIRONMENTS
from rljax.tools import TOOLS, CallOutcome
from rljax.workflows.environment import EnvironmentWorkflow
from rljax.workflows.tool_use import ToolUse

PAGE = Path(__file__).resolve().parents[3] / "docs" / "environments.md"


def test_the_pages_examples_run(monkeypatch):
    pytest.importorskip("simpleeval")
    import sys

    monkeypatch.setitem(sys.modules, "my_environments", None)  # the page puts its own there; this is undone
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    from rljax.configs import base

    names["with_tools"](base.get_config())
    names["with_environment"](base.get_config())


def test_the_page_names_what_there_is():
    text = PAGE.read_text()
    named = [*ENVIRONMENTS, *TOOLS, *(kind for kind in CallOutcome if kind is not CallOutcome.OK)]
    for workflow in (ToolUse, EnvironmentWorkflow):
        parameters = inspect.signature(workflow).parameters.values()
        named += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert not [name for name in named if f"`{name}`" not in text]
