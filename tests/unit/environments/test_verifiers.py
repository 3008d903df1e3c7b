"""Environments of the package verifiers: their datasets as prompts, their episodes over the endpoint."""

import asyncio
import sys
import types

import numpy as np
import pytest

from rljax.chat.messages import parse_messages
from rljax.data.tasks import make_task
from rljax.errors import AgentError, UserError
from rljax.types import Prompt, SamplingParams
from rljax.workflows import build_workflow
from tests.unit.agents.endpoint_under_test import Script, make_tokenizer

vf = pytest.importorskip("verifiers", reason="needs the extra [verifiers]")
datasets = pytest.importorskip("datasets")

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 3}}</tool_call>'


def multiply(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: one.
        b: the other.
    """
    return str(a * b)


def load_environment(kind="tool", most=3):
    rows = [{"question": f"{a}*3?", "answer": str(3 * a)} for a in (12, 5)]

    def right(completion, answer):
        return float(answer in completion[-1]["content"])

    def length(completion):
        return float(len(completion))

    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    dataset = datasets.Dataset.from_list(rows)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=dataset, rubric=rubric)
    return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[multiply], max_turns=most)


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = types.ModuleType("own_verifiers")
    module.load_environment = load_environment
    monkeypatch.setitem(sys.modules, module.__name__, module)


def prompts(**arguments):
    records = make_task("task:verifiers/own_verifiers", "train", arguments, "train_dataset")
    rows = [records[i] for i in range(len(records))]
    return [Prompt(f"0/{i}", tuple(parse_messages(r.pop("messages"), "row")), r) for i, r in enumerate(rows)]


def played(tokenizer, speak, prompt):
    script = Script(tokenizer, speak)
    arguments = {"agent": "rljax.environments.verifiers:play"}
    workflow = build_workflow("agent", tokenizer=tokenizer, rewards=None, arguments=arguments)
    params = SamplingParams(256, stop_token_ids=tokenizer.eos_token_ids)
    return script, asyncio.run(workflow.episode(script, prompt, params, 7))


def test_an_environment_with_tools_is_played_on_the_sampled_tokens(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    first, second = prompts()
    script, (trajectory,) = played(tokenizer, lambda text: "It is 36.<eos>" if "tool:36" in text else f"{CALL}<eos>", first)
    assert trajectory.reward == 1.0 and trajectory.components["right"] == 1.0
    assert (trajectory.components["turns"], trajectory.components["length"]) == (2, 3)
    np.testing.assert_array_equal(
        trajectory.token_ids[trajectory.loss_mask], np.concatenate([c.token_ids for c in script.completions])
    )
    assert "multiply" in tokenizer.decode(script.requests[0].prompt_ids, skip_special_tokens=False)
    _, (wrong,) = played(tokenizer, lambda text: "It is 36.<eos>", second)
    assert wrong.reward == 0.0


def test_what_goes_wrong_is_the_environment_s_failure_or_one_line(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(tmp_path)
    (prompt, _) = prompts(kind="single")

    async def broken(*_, **__):
        raise vf.Error("lost its sandbox")

    monkeypatch.setattr(vf.SingleTurnEnv, "setup_state", broken)
    with pytest.raises(AgentError, match="lost its sandbox"):
        played(tokenizer, lambda text: "36<eos>", prompt)
    with pytest.raises(UserError, match="no field 'verifiers'"):
        played(tokenizer, lambda text: "36<eos>", Prompt("0/0", prompt.messages, {}))
    for path, arguments, line in (
        ("own_verifiers", {"kin": "x"}, "verifiers: own_verifiers: .*unexpected keyword argument 'kin'"),
        ("own_verifierz", {}, "verifiers: own_verifierz: .*Could not import"),
    ):
        with pytest.raises(UserError, match=line):
            make_task(f"task:verifiers/{path}", "train", arguments, "train_dataset")
