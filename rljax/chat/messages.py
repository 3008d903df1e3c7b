"""Chat messages and tool definitions as data: checked once, and brought to one shape.

A message is a mapping with `role` and `content`, and where it needs them `tool_calls`,
`tool_call_id`, `name` and `reasoning_content`:

    {"role": "user", "content": "What is 12+30?"}
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}]}
    {"role": "tool", "tool_call_id": "c1", "content": "42"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.config.registry import nearest
from rljax.errors import UserError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # an OpenAI tool definition: {"type": "function", "function": {"name": ..., "parameters": ...}}

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "environment", "ipython", "observation", "context")
_PLAIN = {"role", "content"}
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
REASONING = ("reasoning", "thinking")  # other names of reasoning_content
MEDIA = ("image", "image_url", "video", "audio")  # types of content parts that are no text


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Checks a conversation and returns it in one shape.

    Keys without a value are dropped, content parts that are all text become one text, and tool
    calls get `{"type": "function", "function": {"name": ..., "arguments": {...}}}` with arguments
    as an object, as chat templates expect them.

    Args:
      value: a list of messages.
      where: "FILE:LINE", for errors.

    Raises:
      UserError: names the message, and what of it is unknown or missing.
    """
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: messages must be a list of objects with role and content, at least one")
    return tuple(_message(message, f"{where}: messages[{i}]") for i, message in enumerate(value))


def joined_tools(own: Sequence[Tool], added: Sequence[Tool]) -> tuple[Tool, ...]:
    """Returns the tools of a prompt and those added to it that have other names."""
    named = {tool["function"]["name"] for tool in own}
    return (*own, *(tool for tool in added if tool["function"]["name"] not in named))


def parse_tools(value: Any, where: str) -> tuple[Tool, ...]:
    """Checks tool definitions, a list or its JSON text, and returns them in OpenAI's form.

    Fields without a value, as a parquet file has them, are dropped.

    Raises:
      UserError: names the definition and what is wrong with it.
    """
    if isinstance(value, str):
        value = _from_json(value, f"{where}: tools") if value.strip() else []
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: tools must be a list of OpenAI tool definitions, or its JSON text")
    return tuple(_tool(_without_none(tool), f"{where}: tools[{i}]") for i, tool in enumerate(value))


def parse_template_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Checks the chat template's arguments: an object, or its JSON text. Raises UserError."""
    if isinstance(value, str):
        value = _from_json(value, f"{where}: chat_template_kwargs") if value.strip() else {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: chat_template_kwargs must be an object, as in {{'enable_thinking': false}}")
    return dict(_without_none(value))


def text_of(message: Message) -> str:
    """Returns the text of a message's content; of content parts, that of those that are text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: a message needs role and content, and is an object, not {type(value).__name__}")
    if value.keys() == _PLAIN and isinstance(value["content"], str) and value["role"] in ROLES:  # as most are
        return dict(value)
    found = {key: item for key, item in value.items() if item is not None}
    for name in REASONING:
        if name in found:
            found.setdefault("reasoning_content", found.pop(name))
    for key in found:
        if key not in KEYS:
            raise UserError(f"{where}: no such key of a message: {key!r} ({nearest(key, KEYS)})")
    role = found.get("role")
    if not isinstance(role, str):
        raise UserError(f"{where}: a message needs role and content (it has: {', '.join(found) or 'nothing'})")
    if role not in ROLES:
        raise UserError(f"{where}: no such role: {role!r} ({nearest(role, ROLES)})")
    for key in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(found.get(key, ""), str):
            raise UserError(f"{where}: {key} is {type(found[key]).__name__}, not text")
    calls = _calls(found.pop("tool_calls", ()), where)
    if "content" not in found and not calls and "reasoning_content" not in found:
        raise UserError(f"{where}: a message needs role and content (it has: {', '.join(found)})")
    found["content"] = _content(found.get("content", ""), where)
    return found | ({"tool_calls": calls} if calls else {})


def _content(value: Any, where: str) -> str | list[Any]:
    """Returns text, or the parts where one of them is no text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: content is {type(value).__name__}, neither text nor a list of parts")
    parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(value)]
    return "".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _part(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    part = {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") in MEDIA:
        return part
    raise UserError(f"{where}: a part is {{'type': 'text', 'text': ...}}, or has a type of {', '.join(MEDIA)}")


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: tool_calls is {type(value).__name__}, not a list")
    return [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(value)]


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") or value if isinstance(value, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call needs function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}.function.arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping | None):
        raise UserError(f"{where}.function.arguments: {type(arguments).__name__}, not an object or its JSON text")
    id_ = {"id": str(value["id"])} if value.get("id") is not None else {}
    return {**id_, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments or {})}}


def _tool(value: Any, where: str) -> Tool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool definition needs function.name, as in OpenAI's API")
    if function is not value and value.get("type", "function") != "function":
        raise UserError(f"{where}: tools of type {value['type']!r} are unknown (function)")
    return {"type": "function", "function": {key: item for key, item in function.items() if key != "type"}}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
