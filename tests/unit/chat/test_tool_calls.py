"""Tool calls in the notations of the families, and reasoning."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.chat.reasoning import split_reasoning
from rljax.chat.tool_calls import PARSERS, ToolCall, find_parser
from rljax.errors import UserError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("and", "or", "not", "if", "in", "is", "for", "as", "def", "del", "try")
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)


def write(family, calls):
    """Writes calls as a model of the family does."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{json.dumps(o)}\n</tool_call>" for o in objects)
        case "llama3_json":
            return "; ".join(json.dumps({"name": o["name"], "parameters": o["arguments"]}) for o in objects)
        case "mistral":
            return f"[TOOL_CALLS]{json.dumps(objects)}"
        case "pythonic":
            made = [f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls]
            return f"[{', '.join(made)}]"


@pytest.mark.parametrize("family", PARSERS)
@settings(max_examples=30)
@given(calls=st.lists(st.builds(ToolCall, NAMES, ARGUMENTS), min_size=1, max_size=3))
def test_what_a_model_writes_is_read_back(family, calls):
    content, found = PARSERS[family]().parse(write(family, calls))
    assert found == calls and not content.strip()


@pytest.mark.parametrize("family", PARSERS)
@settings(max_examples=30)
@given(text=st.text(alphabet='<tool_call>/{"name:agums[]}()=,TOLCS_|pyh \n', max_size=60))
def test_text_that_is_no_call_stays_as_it_is(family, text):
    content, calls = PARSERS[family]().parse(text)
    assert calls or content == text


def test_content_around_calls_is_kept_and_a_broken_one_stays():
    good, broken = '<tool_call>{"name": "a", "arguments": {"s": "</tool_call>"}}</tool_call>', '<tool_call>{"name": "b", '
    content, calls = PARSERS["hermes"]().parse(f"First {good} then {broken}")
    assert calls == [ToolCall("a", {"s": "</tool_call>"})] and content == f"First  then {broken}"


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        (
            "mistral",
            'Let me see.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
            [ToolCall("add", {"a": 1}), ToolCall("now", {})],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": "{\\"a\\": 1}"}]', [ToolCall("add", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ToolCall("add", {"a": 1})]),
        ("pythonic", "<|python_start|>[math.add(a=1)]<|python_end|>", [ToolCall("math.add", {"a": 1})]),
        ("pythonic", "[add(1, b=2)]", []),
        ("pythonic", "[__import__('os').system(c='x')]", []),
        ("pythonic", "[1, 2]", []),
        ("llama3_json", '{"answer": 3}', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": NaN}</tool_call>', []),
    ],
)
def test_notations(family, text, calls):
    assert PARSERS[family]().parse(text)[1] == calls


def test_the_family_follows_from_the_template():
    for template, parser in (
        ("... <tool_call> ...", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ('{"name": x, "parameters": y}', "llama3_json"),
        ("{{ content }}", "hermes"),
    ):
        assert type(find_parser("auto", template)) is PARSERS[parser]
    with pytest.raises(UserError, match=r"no parser of tool calls named 'hermse'.*hermes"):
        find_parser("hermse", "")


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nwhy\n</think>\n\n4", False, ("why", "4")),
        ("why\n</think>\n\n4", True, ("why", "4")),
        ("why", True, ("why", "")),
        ("4 </think>", False, ("", "4 </think>")),
        (" 4", False, ("", " 4")),
    ],
)
def test_reasoning_is_what_stands_between_the_marks(text, opened, parts):
    assert split_reasoning(text, opened=opened) == parts
