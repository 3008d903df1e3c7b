"""Episodes with tools: calls are answered, results are not trained on, failures are counted."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from rljax.config.schema import DatasetConfig, RolloutConfig
from rljax.data import open_prompts
from rljax.errors import UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import Score
from rljax.types import PROMPT_VERSION, Finish, Prompt, SamplingParams
from rljax.workflows import build_workflow, tools_of
from tests.unit.workflows.scripted import ScriptedSampler

# Turns as "[role]text|", with the tools before the first
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '{' }}{{ tool['function']['name'] }}{{ '}' }}{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Shows an answer only behind the call that it answers
PAIRED = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}[{{ m['role'] }}]{{ m['content'] }}|{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{% for a in messages if a['tool_call_id'] == call['id'] %}"
    "{{ '{' }}{{ call['function']['name'] }}: {{ a['content'] }}{{ '}' }}{% endfor %}{% endfor %}{% endfor %}"
    "{% for tool in tools or [] %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPT = Prompt("0/3", ({"role": "user", "content": "12*12?"},), {"answer": "144"})


class Exact:
    def __init__(self):
        self.seen = []

    async def score(self, prompt, completion):
        self.seen.append(completion)
        return Score(float(completion == prompt.fields["answer"]), {"exact": 1.0})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    Path(directory, "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


def test_a_template_that_shows_answers_behind_their_calls_gets_both(tmp_path):
    build_char_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(PAIRED)
    tokenizer = load_tokenizer(tmp_path)
    trajectory, _, _ = use_tools(tokenizer, called("calculator", expression="12*12"), "144")
    given = tokenizer.decode(trajectory.token_ids[~trajectory.loss_mask])
    assert given.endswith("{calculator: 144}[assistant]")


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def use_tools(tokenizer, *texts, prompt=PROMPT, finish=Finish.STOP, **arguments):
    sampler, rewards = ScriptedSampler(tokenizer, *texts, finish=finish, end=ord("|") - 27), Exact()
    assert tokenizer.decode([sampler.end]) == "|"
    workflow = build_workflow("tool_use", tokenizer=tokenizer, rewards=rewards, arguments=arguments)
    trajectory = asyncio.run(workflow.episode(sampler, prompt, SamplingParams(99, stop_token_ids=(sampler.end,)), 3))
    return trajectory, sampler, rewards


def test_results_of_tools_are_read_and_not_trained_on(tokenizer):
    trajectory, sampler, rewards = use_tools(tokenizer, "so: " + called("calculator", expression="12*12"), "144")
    ids, logp, versions = sampler.sampled()
    mask = trajectory.loss_mask
    assert trajectory.token_ids[mask].tolist() == ids and trajectory.versions[mask].tolist() == versions
    assert trajectory.behavior_logp[mask].tolist() == logp
    assert set(trajectory.versions[~mask]) == {PROMPT_VERSION}
    given = tokenizer.decode(trajectory.token_ids[~mask])
    assert given == "{calculator}[user]12*12?|[assistant]" + "|[tool]144|[assistant]"
    assert sampler.requests[1].prompt_ids[: len(sampler.requests[0].prompt_ids)].tolist() == list(
        sampler.requests[0].prompt_ids
    )
    assert rewards.seen[-1].rstrip("|") == "144" and trajectory.finish is Finish.STOP
    counts = {
        "turns": 2.0,
        "context_full": 0.0,
        "tool_calls": 1.0,
        "tool_error": 0.0,
        "tool_timeout": 0.0,
        "unknown_tool": 0.0,
        "bad_arguments": 0.0,
    }
    assert trajectory.components == {"exact": 1.0} | counts


def test_several_calls_of_a_turn_and_their_failures(tokenizer):
    calls = [
        called("calculator", expression="1/0"),
        called("calculater"),
        called("calculator"),
        called("calculator", expression="2"),
    ]
    trajectory, _, _ = use_tools(tokenizer, "".join(calls), "144", max_output=60)
    text = tokenizer.decode(trajectory.token_ids)
    results = [part.partition("|")[0] for part in text.split("[tool]")[1:]]
    assert results[0].startswith("Error: division by zero") and results[1].startswith("Error: no tool named 'calculater'")
    assert results[2].startswith("Error: calculator: missing") and results[3] == "2"
    assert [trajectory.components[k] for k in ("tool_calls", "tool_error", "unknown_tool", "bad_arguments")] == [4, 1, 1, 1]


def test_an_episode_ends_at_its_limits(tokenizer):
    asks = called("calculator", expression="1+1")
    trajectory, sampler, _ = use_tools(tokenizer, *[asks] * 5, max_turns=3)
    assert len(sampler.requests) == 3 == trajectory.components["turns"] and trajectory.components["tool_calls"] == 2
    assert trajectory.finish is Finish.TOOL_CALLS  # it would have gone on
    assert trajectory.loss_mask[-1]  # and no result stands behind the last call
    trajectory, sampler, _ = use_tools(tokenizer, *[asks] * 5, max_tokens=len(asks))
    assert len(sampler.requests) == 1 and trajectory.finish is Finish.TOOL_CALLS
    trajectory, sampler, _ = use_tools(tokenizer, *[asks] * 5, finish=Finish.LENGTH)
    assert len(sampler.requests) == 1 and trajectory.finish is Finish.LENGTH
    trajectory, sampler, _ = use_tools(tokenizer, "<tool_call>{broken</tool_call>")
    assert len(sampler.requests) == 1 and trajectory.finish is Finish.STOP  # no call: that is its answer


def test_tools_that_never_return_and_those_of_the_users(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(
        "import time\n"
        "def wait(n: int) -> str:\n    '''Waits.\n\n    Args:\n        n: seconds.\n    '''\n"
        "    time.sleep(n)\n    return 'done'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = (called("wait", n=3600), called("wait", n=0), "144")
    trajectory, _, _ = use_tools(tokenizer, *texts, tools=["own_tools:wait"], tool_timeout=0.3)
    text = tokenizer.decode(trajectory.token_ids)
    assert text.startswith("{wait}") and "[tool]Error: wait ran longer than 0.3 s|" in text and "[tool]done|" in text
    assert trajectory.components["tool_timeout"] == 1.0 and trajectory.components["tool_calls"] == 2.0


def test_tools_of_the_prompt_come_first_and_stay(tokenizer):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    prompt = Prompt("0/3", PROMPT.messages, PROMPT.fields, tools=(other,))
    trajectory, _, _ = use_tools(tokenizer, called("other"), "144", prompt=prompt)
    assert tokenizer.decode(trajectory.token_ids).startswith("{other}{calculator}[user]")
    assert trajectory.components["unknown_tool"] == 1.0  # defined, but nothing is behind it


def test_prompts_are_opened_with_the_tools_that_the_policy_sees(tokenizer, tmp_path):
    """Lengths that are checked before a run are those of the requests."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "12*12?", "answer": "144"}\n')
    dataset = DatasetConfig(path=str(tmp_path / "a.jsonl"))
    arguments = {"tools": ["calculator"], "max_turns": 1}
    added = tools_of(RolloutConfig(workflow="tool_use", workflow_args=arguments))
    assert not tools_of(RolloutConfig())
    (prompt,) = open_prompts(dataset, seed=1, tokenizer=tokenizer, added_tools=added).epoch(0)
    sampler = ScriptedSampler(tokenizer, "144")
    workflow = build_workflow("tool_use", tokenizer=tokenizer, rewards=Exact(), arguments=arguments)
    bare = dataclasses.replace(prompt, tools=())
    for given in (prompt, bare):
        asyncio.run(workflow.episode(sampler, given, SamplingParams(64), 1))
        np.testing.assert_array_equal(sampler.requests.pop().prompt_ids, tokenizer.encode_prompt(prompt))
    short = dataclasses.replace(dataset, max_length=len(tokenizer.encode_prompt(prompt)) - 1)
    assert len(open_prompts(short, seed=1, tokenizer=tokenizer)) == 1
    with pytest.raises(UserError, match="every prompt is longer"):
        open_prompts(short, seed=1, tokenizer=tokenizer, added_tools=added)


def test_text_of_a_tool_never_ends_a_turn(tokenizer):
    """Output of a tool is encoded as text, even where it spells the EOS."""
    trajectory, _, _ = use_tools(tokenizer, called("<eos>"), "144")
    assert tokenizer.eos_token_id not in trajectory.token_ids[~trajectory.loss_mask]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"tools": ["calculater"]}, "rollout.workflow_args.tools: no tool named 'calculater'"),
        ({"tool_parser": "hermse"}, "rollout.workflow_args.tool_parser: no parser of tool calls named 'hermse'"),
        ({"reasoning_parser": "thin"}, "rollout.workflow_args.reasoning_parser: no such parser: 'thin'"),
        ({"max_turns": 0}, "rollout.workflow_args.max_turns: 0 (at least 1)"),
        ({"tool_timeout": 0}, "rollout.workflow_args.tool_timeout: 0 (seconds, above 0)"),
        ({"max_output": True}, "rollout.workflow_args.max_output: True (at least 1)"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tokenizer, arguments, line):
    with pytest.raises(UserError) as caught:
        use_tools(tokenizer, **arguments)
    assert str(caught.value).startswith(line)


def test_python_of_the_policy_runs_in_the_sandbox(tokenizer):
    try:
        trajectory, _, _ = use_tools(tokenizer, called("python", code="print(12 * 12)\n1/0"), "144", tools=["python"])
    except UserError as error:
        pytest.skip(f"left out: {error}")
    text = tokenizer.decode(trajectory.token_ids)
    assert "[tool]144\nTraceback" in text and "ZeroDivisionError" in text and trajectory.components["tool_error"] == 1.0
    assert np.isfinite(trajectory.behavior_logp).all()
