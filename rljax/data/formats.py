"""Formats: conversion of a record to chat messages and the fields that the reward needs.

A format is a function of (record, where) that returns (messages, fields) and raises UserError.
Fields hold JSON values, "answer" among them: the text that supervised training teaches. Fields
`tools` and `chat_template_kwargs` go to the chat template. Messages that end with an assistant's
turn and have no "answer" are a prompt and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rljax.config import registry
from rljax.errors import UserError
from rljax.hf.messages import Message, parse_messages

Messages = tuple[Message, ...]
Format = Callable[[Mapping[str, Any], str], tuple[Messages, dict[str, Any]]]

FORMATS = {
    "gsm8k": "rljax.data.formats:gsm8k",
    "prompt_answer": "rljax.data.formats:prompt_answer",
    "task": "rljax.data.formats:prompt_answer",
}


def find_format(name: str, key: str) -> Format:
    """Returns a format of rljax by name, or the user's by "package.module:function".

    Raises UserError.
    """
    return registry.resolve(f"{key}.type", name, FORMATS, "format", ("record", "where"))


def gsm8k(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Grade-school mathematics: a question, and an answer whose last line is `#### N`.

    Field "final" is N. Cobbe et al. 2021, arXiv:2110.14168.
    """
    question, answer = _text(record, "question", where), _text(record, "answer", where)
    _, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        raise UserError(f"{where}: the answer has no line '#### N' (format gsm8k)")
    fields = {"question": question, "answer": answer, "final": final.strip().replace(",", "")}
    return ({"role": "user", "content": question},), fields


def prompt_answer(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Records with `prompt`, `question` or `messages`, and `answer`.

    All other fields of the record are kept for the reward. If the messages end with an assistant's
    turn, that turn may be the answer.
    """
    source = next((name for name in ("messages", "prompt", "question") if name in record), None)
    if source is None:
        raise UserError(f"{where}: none of the fields messages, prompt, question ({_fields_of(record)})")
    fields = {name: value for name, value in record.items() if name != source or source == "question"}
    if source != "messages":
        messages: Messages = ({"role": "user", "content": _text(record, source, where)},)
    else:
        messages = parse_messages(record["messages"], where)
        if "answer" not in record and messages[-1]["role"] == "assistant":
            return messages, fields
    fields["answer"] = _text(fields, "answer", where)
    return messages, fields


def with_system(messages: Messages, system_prompt: str) -> Messages:
    """Adds the system prompt before the messages, unless they have a system message of their own."""
    if not system_prompt or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise UserError(f"{where}: no field {name!r} ({_fields_of(record)})")
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: field {name!r} is {type(value).__name__}, not text")
    return str(value)


def _fields_of(record: Mapping[str, Any]) -> str:
    return "it has: " + ", ".join(record) if record else "it is empty"
