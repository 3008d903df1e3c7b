"""Messages and tool definitions: whatever API or file they come from, one shape; what is unknown is
refused by name.
"""

import json

import pytest

from rljax.chat.messages import parse_messages, parse_template_kwargs, parse_tools, text_of
from rljax.errors import UserError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None]}}}
FLAT = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1, "b": [null]}'}},
        {"id": "c1", "name": "add", "arguments": {"a": 1, "b": [None]}},
        {"id": "c1", "index": 0, "type": "function", "function": CALL["function"]},
    ],
)
@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_calls_have_one_shape_whatever_api_wrote_them(call, content):
    message = {"role": "assistant", "tool_calls": [call], "refusal": None} | (
        {} if content == "absent" else {"content": content}
    )
    (parsed,) = parse_messages([message], "x")
    assert parsed == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parse_messages([parsed], "x") == (parsed,)


def test_text_in_parts_is_text_and_parts_that_are_none_are_kept():
    parts = [{"type": "text", "text": "a", "cache_control": None}, "b"]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    text, seen = parse_messages([{"role": "user", "content": content} for content in (parts, [*parts, image])], "x")
    assert text["content"] == text_of(seen) == "ab"
    assert seen["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, image]


def test_reasoning_has_one_name():
    messages = [{"role": "assistant", "content": "x", name: "y"} for name in ("reasoning_content", "reasoning", "thinking")]
    assert {json.dumps(message, sort_keys=True) for message in parse_messages(messages, "x")} == {
        '{"content": "x", "reasoning_content": "y", "role": "assistant"}'
    }


def test_tools_have_one_shape_and_no_fields_that_a_table_filled_up():
    whole = {"type": "function", "function": FLAT}
    sparse = {"type": "function", "function": FLAT | {"strict": None, "parameters": {"type": "object", "properties": None}}}
    for tools in ([whole], [FLAT], [sparse], json.dumps([whole])):
        assert parse_tools(tools, "x") == (whole,)
    assert parse_tools("", "x") == parse_tools([], "x") == ()
    assert parse_template_kwargs('{"enable_thinking": false}', "x") == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            {"role": "user", "contents": "x"},
            "messages[1]: no such key of a message: 'contents' (did you mean content",
        ),
        ({"role": "user", "content": "x", "weight": 0}, "messages[1]: no such key of a message: 'weight'"),
        ({"role": "asistant", "content": "x"}, "messages[1]: no such role: 'asistant' (did you mean assistant"),
        ({"content": "x"}, "messages[1]: a message needs role and content (it has: content)"),
        ({"role": "user"}, "messages[1]: a message needs role and content (it has: role)"),
        ({"role": "user", "content": 5}, "messages[1]: content is int, neither text nor a list of parts"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0]: a part is "),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1]: tool_call_id is int, not text"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1]: tool_calls is dict, not a list"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            "messages[1].tool_calls[0]: a tool call needs function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "messages[1].tool_calls[0].function.arguments: not JSON: ",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "messages[1].tool_calls[0].function.arguments: list, not an object or its JSON text",
        ),
        ("hello", "messages[1]: a message needs role and content, and is an object, not str"),
    ],
)
def test_what_is_no_message_is_told_by_file_line_and_message(message, line):
    with pytest.raises(UserError) as caught:
        parse_messages([{"role": "user", "content": "x"}, message], "a.jsonl:3")
    assert str(caught.value).startswith("a.jsonl:3: " + line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "value", "line"),
    [
        (parse_tools, {"name": "f"}, "x: tools must be a list of OpenAI tool definitions"),
        (parse_tools, "[", "x: tools: not JSON: "),
        (parse_tools, [{"type": "function"}], "x: tools[0]: a tool definition needs function.name"),
        (
            parse_tools,
            [{"type": "web_search", "function": {"name": "f"}}],
            "x: tools[0]: tools of type 'web_search'",
        ),
        (parse_template_kwargs, [1], "x: chat_template_kwargs must be an object"),
        (parse_messages, "hello", "x: messages must be a list of objects with role and content, at least one"),
    ],
)
def test_what_is_no_tool_and_no_argument_is_refused(parse, value, line):
    with pytest.raises(UserError) as caught:
        parse(value, "x")
    assert str(caught.value).startswith(line)
