"""docs/agents.md runs as it stands, and names what there is."""

import asyncio
import re
import sys
import types
from pathlib import Path

import pytest

from rljax.agents.agent import ARGUMENTS
from rljax.agents.parameters import CHAT, COMPLETION, LABELS, NEUTRAL
from rljax.chat.tool_calls import PARSERS
from rljax.types import Prompt, SamplingParams
from rljax.workflows import build_workflow
from tests.unit.agents.endpoint_under_test import Script, make_tokenizer

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "agents.md").read_text()


def test_the_pages_agent_runs(tmp_path, monkeypatch):
    (block,) = re.findall(r"<!-- agent -->\n```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    module = types.ModuleType("agent_of_the_page")
    exec(compile(block, "docs/agents.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokenizer = make_tokenizer(tmp_path)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 3}}</tool_call>'
    script = Script(tokenizer, lambda prompt: "It is 36.<eos>" if "tool:36" in prompt else f"{call}<eos>")
    workflow = build_workflow("agent", tokenizer=tokenizer, rewards=None, arguments={"agent": f"{module.__name__}:agent"})
    prompt = Prompt("0/0", ({"role": "user", "content": "12*3?"},), {"answer": "36"})
    params = SamplingParams(256, stop_token_ids=tokenizer.eos_token_ids)
    (trajectory,) = asyncio.run(workflow.episode(script, prompt, params, 7))
    assert trajectory.reward == 1.0 and trajectory.components["turns"] == 2


@pytest.mark.parametrize(
    "names", [ARGUMENTS, set(CHAT) - set(NEUTRAL) - set(LABELS), set(COMPLETION) - set(NEUTRAL) - set(LABELS), PARSERS]
)
def test_the_page_names_what_there_is(names):
    said = set(re.findall(r"`([\w.]+)`", TEXT)) | {"best_of", "stream_options"}
    assert set(names) <= said
