"""Tool calls in the text of a reply, in the notations of the model families.

    parser = find_parser("auto", tokenizer.chat_template)
    content, calls = parser.parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')

A notation that is broken or cut off is no call: it stays in the content.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rljax.config.registry import nearest
from rljax.errors import UserError

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for.

    Example: ToolCall("add", {"a": 12, "b": 30})
    """

    name: str
    arguments: Mapping[str, Any]  # JSON values


Parsed = tuple[str, list[ToolCall]]  # the content that is left, and the calls in order


class ToolCallParser(Protocol):
    """Notation of tool calls."""

    special: bool  # its marks are special tokens: the text has to be decoded with them
    id_length: int | None  # characters of a call's id where the template demands so many letters and digits; None: any

    def parse(self, text: str) -> Parsed:
        """Takes the calls out of a reply's text. Never raises."""
        ...


class Hermes:
    """Hermes, Qwen2.5, Qwen3, SmolLM3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    special = False
    id_length: int | None = None
    start, end = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> Parsed:
        content, calls, position = [], [], 0
        while (begin := text.find(self.start, position)) >= 0:
            found = _json_at(text, begin + len(self.start))
            call = None if found is None else _call(found[0], "arguments")
            close = None if found is None else re.compile(rf"\s*{re.escape(self.end)}").match(text, found[1])
            if call is None or close is None:
                content.append(text[position : begin + len(self.start)])
                position = begin + len(self.start)
                continue
            content.append(text[position:begin])
            calls.append(call)
            position = close.end()
        return "".join([*content, text[position:]]), calls


class Llama3Json:
    """Llama 3.1 to 3.3: the whole reply is `{"name": ..., "parameters": {...}}`, several with `;`."""

    special = True
    id_length: int | None = None
    mark = "<|python_tag|>"

    def parse(self, text: str) -> Parsed:
        before, mark, after = text.partition(self.mark)
        content, body = (before, after) if mark else ("", text)
        calls, position = [], 0
        while position < len(body.rstrip()):
            found = _json_at(body, position)
            call = None if found is None else _call(found[0], "parameters") or _call(found[0], "arguments")
            if found is None or call is None:
                return text, []
            calls.append(call)
            separator = re.compile(r"\s*;?\s*").match(body, found[1])
            position = separator.end() if separator else found[1]
        return (content, calls) if calls else (text, [])


class Mistral:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    special = True
    id_length: int | None = 9
    mark, arguments = "[TOOL_CALLS]", "[ARGS]"

    def parse(self, text: str) -> Parsed:
        content, *bodies = text.split(self.mark)
        calls: list[ToolCall] = []
        for body in bodies:
            found = self._calls(body)
            if not found:
                return text, []
            calls += found
        return (content, calls) if calls else (text, [])

    def _calls(self, body: str) -> list[ToolCall]:
        found = _json_at(body, 0)
        if found is not None:
            values = found[0] if isinstance(found[0], list) else [found[0]]
            calls = [_call(value, "arguments") for value in values]
            return [call for call in calls if call] if all(calls) and not body[found[1] :].strip() else []
        named = re.compile(rf"\s*([\w.-]+?)\s*(?:{re.escape(self.arguments)})?\s*(?=\{{)").match(body)
        found = _json_at(body, named.end()) if named else None
        if named is None or found is None or not isinstance(found[0], dict) or body[found[1] :].strip():
            return []
        return [ToolCall(named[1], found[0])]


class Pythonic:
    """Llama 4 and others: the whole reply is `[add(a=12, b=30), now()]`, with literals."""

    special = True
    id_length: int | None = None
    marks = ("<|python_start|>", "<|python_end|>")

    def parse(self, text: str) -> Parsed:
        source = text
        for mark in self.marks:
            source = source.replace(mark, "")
        try:
            tree = ast.parse(source.strip(), mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else []
            calls = [_literal_call(node) for node in nodes]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return text, []
        return ("", calls) if calls else (text, [])


PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
}
# What a chat template of the family contains, the most telling first
FAMILIES: Sequence[tuple[str, str]] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def find_parser(name: str, chat_template: str, key: str = "tool_parser") -> ToolCallParser:
    """Returns the parser of a name, or for "auto" that of the chat template's family.

    A template of no family known gets "hermes".

    Raises:
      UserError: no parser has this name.
    """
    if name == AUTO:
        name = next((parser for mark, parser in FAMILIES if mark in chat_template), "hermes")
    if name not in PARSERS:
        raise UserError(f"{key}: no parser of tool calls named {name!r} ({nearest(name, [AUTO, *PARSERS])})")
    return PARSERS[name]()


def _json_at(text: str, position: int) -> tuple[Any, int] | None:
    """Returns the JSON value at a position, blanks before it skipped, and where it ends."""
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, position)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _call(value: Any, key: str) -> ToolCall | None:
    """Returns the call that an object with a name and arguments, or their JSON text, describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or key not in value:
        return None
    arguments = value[key]
    if isinstance(arguments, str):
        found = _json_at(arguments, 0)
        arguments = None if found is None or arguments[found[1] :].strip() else found[0]
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _literal_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with keyword arguments alone")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    json.dumps(arguments, allow_nan=False)  # TypeError, ValueError: values that JSON lacks
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError(f"{name} is no name")
    return ToolCall(name, arguments)
