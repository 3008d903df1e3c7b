"""Formats: conversion of a record to chat messages and the fields that the reward needs.

A format is a function of (record, where) that returns (messages, fields) and raises UserError.
Fields hold JSON values, "answer" among them: the text that supervised training teaches. Fields
`tools` and `chat_template_kwargs` go to the chat template. Messages that end with an assistant's
turn and have no "answer" are a prompt and its answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljax.chat.messages import Message, parse_messages
from rljax.config import registry
from rljax.errors import UserError

Messages = tuple[Message, ...]
Format = Callable[[Mapping[str, Any], str], tuple[Messages, dict[str, Any]]]

FORMATS = {
    "areal_gsm8k": "rljax.data.formats:areal_gsm8k",
    "gsm8k": "rljax.data.formats:gsm8k",
    "prompt_answer": "rljax.data.formats:prompt_answer",
    "task": "rljax.data.formats:prompt_answer",
    "trl": "rljax.data.formats:trl",
    "verl": "rljax.data.formats:verl",
}


AREAL_REQUEST = "Please put your final answer within \\boxed{}."  # as in AReaL's areal/dataset/gsm8k.py
_JSON_MESSAGES = re.compile(r'\s*\[\s*\{[^{}]*"role"\s*:')
_GSM8K = re.compile(r"\n#### [^\n]+\s*\Z")


def find_format(name: str, key: str) -> Format:
    """Returns a format of rljax by name, or the user's by "package.module:function".

    Raises UserError.
    """
    return registry.resolve(f"{key}.type", name, FORMATS, "format", ("record", "where"), may_be_async=False)


def told_by_columns(record: Mapping[str, Any], where: str) -> str:
    """Returns the name of the format that a record with these columns has. Raises UserError."""
    columns = set(record)
    if {"prompt", "reward_model"} <= columns:
        return "verl"
    if {"question", "answer"} <= columns and _GSM8K.search(str(record["answer"])):
        return "gsm8k"
    if columns & {"prompt", "question", "messages"} and "answer" in columns:
        return "prompt_answer"
    if columns & {"prompt", "messages"}:
        return "trl"
    needed = "an answer beside the question" if "question" in columns else "a prompt, question or messages"
    raise UserError(f"{where}: its columns are of no format ({_fields_of(record)}; {needed} is needed)")


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


def areal_gsm8k(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """GSM8K as AReaL asks it: with a request for a boxed answer in a line of its own."""
    (question,), fields = gsm8k(record, where)
    return ({**question, "content": f"{question['content']}\n{AREAL_REQUEST}"},), fields


def prompt_answer(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Records with `prompt`, `question` or `messages`, and `answer`.

    All other fields of the record are kept for the reward. If the messages end with an assistant's
    turn, that turn may be the answer.
    """
    messages, fields = _conversation(record, ("messages", "prompt", "question"), where)
    if "answer" in record or messages[-1]["role"] != "assistant":
        fields["answer"] = _text(record, "answer", where)
    return messages, fields


def trl(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Records as TRL has them: `prompt`, text or a list of messages, or `messages`.

    `completion` (of a prompt-completion pair), or an assistant's turn at the end, is the answer; a
    record may have none. All other columns are kept for the reward, and so is a conversational
    prompt.
    """
    if "completion" not in record or "answer" in record:
        return _conversation(record, ("prompt", "messages"), where)
    completion = _decoded(record["completion"], "completion", where)
    reply = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else _turns(completion, "completion", where)
    )
    whole = {name: value for name, value in record.items() if name != "completion"}
    prompt = _decoded(record.get("prompt"), "prompt", where)
    whole["prompt"] = [*_turns(prompt, "prompt", where), *reply]
    messages, fields = _conversation(whole, ("prompt",), where)
    if isinstance(prompt, str):
        del fields["prompt"]
    return messages, fields


def verl(record: Mapping[str, Any], where: str) -> tuple[Messages, dict[str, Any]]:
    """Rows as verl has them: `data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`.

    Field "ground_truth" is reward_model's, and so is "answer" if it is text and the row has none
    of its own. All columns are kept for the reward.
    """
    model = _object(record.get("reward_model"), "reward_model", where)
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise UserError(f"{where}: no reward_model.ground_truth ({_fields_of(record)}; format verl)")
    record = dict(record) | {"reward_model": model}
    if "extra_info" in record:
        record["extra_info"] = _object(record["extra_info"], "extra_info", where)
    messages, fields = _conversation(record, ("prompt",), where)
    truth = model["ground_truth"]
    answer = {"answer": str(truth)} if isinstance(truth, str | int | float) else {}
    return messages, {"ground_truth": truth, **answer, **fields}


def _conversation(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[Messages, dict[str, Any]]:
    """Returns the messages of the first of these columns that has some, and all other fields.

    Sets that were joined have null in the columns of the others; such a column is as if not there.
    A conversational `prompt` stays a field without a reply at its end, by which rewards of TRL's
    shape are called.
    """
    there = [name for name in names if name in record]
    source = next((name for name in there if record[name] is not None), there[0] if len(there) == 1 else None)
    if source is None and there:
        raise UserError(f"{where}: the fields {' and '.join(there)} are null, not text or a list of messages")
    if source is None:
        raise UserError(f"{where}: none of the fields {', '.join(names)} ({_fields_of(record)})")
    value = _decoded(record[source], source, where) if source != "question" else record[source]
    is_text = source == "question" or isinstance(value, str | int | float)
    value = _text(record, source, where) if is_text else value
    messages = parse_messages(_turns(value, source, where), where)
    fields = {name: value for name, value in record.items() if name != source or source == "question"}
    fields = {name: value for name, value in fields.items() if name not in there or value is not None}
    if source == "prompt" and not is_text:
        has_reply = "answer" not in fields and messages[-1]["role"] == "assistant"
        fields["prompt"] = [dict(message) for message in messages[: -1 if has_reply else None]]
    return messages, fields


def _decoded(value: Any, name: str, where: str) -> Any:
    """Returns a conversation that is written as JSON text; any other value as it is.

    Text in a column of messages has to be JSON; that of a prompt may be, and else is what the user
    says. Raises UserError.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value) if name == "messages" or _JSON_MESSAGES.match(value) else None
    except ValueError:
        found = None
    if isinstance(found, list) and all(isinstance(message, Mapping) and "role" in message for message in found):
        return found
    if name == "messages":
        raise UserError(f"{where}: messages is text, and no JSON list of messages (text alone belongs into prompt)")
    return value


def with_system(messages: Messages, system_prompt: str) -> Messages:
    """Adds the system prompt before the messages, unless they have a system message of their own."""
    if not system_prompt or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def _turns(value: Any, name: str, where: str) -> list[Any]:
    """Returns a prompt as a list of messages: text is what a user says.

    Also reads the mapping of lists that older `datasets` made of a list of mappings.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        found = "null" if value is None else type(value).__name__
        raise UserError(f"{where}: field {name!r} is {found}, not text or a list of messages")
    if not value:
        raise UserError(f"{where}: messages must be a list of objects with role and content, at least one")
    return value


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise UserError(f"{where}: no field {name!r} ({_fields_of(record)})")
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: field {name!r} is {type(value).__name__}, not text")
    if isinstance(value, float) and not math.isfinite(value):  # a missing number is NaN in pandas
        raise UserError(f"{where}: field {name!r} is {value}, not text")
    return str(value)


def _object(value: Any, name: str, where: str) -> Any:
    """Returns an object that is written as JSON text; any other value as it is. Raises UserError."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise UserError(f"{where}: {name} is text, and no JSON object (format verl)")
    return found


def _fields_of(record: Mapping[str, Any]) -> str:
    return "it has: " + ", ".join(record) if record else "it is empty"
