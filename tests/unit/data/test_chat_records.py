"""Chat records: tools, arguments and replies come with the prompt, and what a chat template or the
learner can't take is told by file and line before anything starts.
"""

import dataclasses
import importlib
import json

import numpy as np
import pytest

from rljax.config.schema import DatasetConfig, WarmupConfig
from rljax.data import Labels, labeled_trajectory, open_prompts
from rljax.errors import UserError
from rljax.hf.tokenizer import load_tokenizer
from rljax.rollout.buffer import Ticket, ticket_from_json, ticket_to_json
from tests.unit.chat import chat_templates as templates

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
CHAT = [
    {"role": "user", "content": "12+30="},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "42", "reasoning_content": "the tool said so"},
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DatasetConfig(path=str(path), shuffle=False)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    found = {}
    for name in ("TOOLS", "CHATML", "THINKS"):
        directory = tmp_path_factory.mktemp(name)
        templates.build_byte_level(directory, getattr(templates, name))
        found[name] = load_tokenizer(directory)
    return found


def test_a_record_keeps_its_calls_reasoning_tools_and_arguments_up_to_the_workers(tmp_path):
    record = {"messages": CHAT, "tools": json.dumps([TOOL]), "chat_template_kwargs": {"x": 1}, "level": 3}
    (prompt,) = open_prompts(write(tmp_path / "a.jsonl", record), seed=1).epoch(0)
    assert [*prompt.messages, *prompt.reply] == CHAT and len(prompt.reply) == 1
    assert prompt.tools == (TOOL,) and prompt.chat_template_kwargs == {"x": 1}
    assert prompt.fields == {"answer": "42", "level": 3}
    ticket = Ticket(index=0, prompt=prompt, attempt=0, failures=0)
    assert ticket_from_json(json.loads(json.dumps(ticket_to_json(ticket)))) == ticket
    older = {"uid": "0/0", "messages": [CHAT[0]], "fields": {}}  # a journal of before
    assert ticket_from_json(ticket_to_json(ticket) | {"prompt": older}).prompt.tools == ()


def test_tools_of_the_config_are_those_of_prompts_without(tmp_path):
    own = {"type": "function", "function": {"name": "own"}}
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    records = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1", "tools": [own]}]
    dataset = dataclasses.replace(write(tmp_path / "a.jsonl", *records), tools=str(tmp_path / "tools.json"))
    assert [prompt.tools for prompt in open_prompts(dataset, seed=1).epoch(0)] == [(TOOL,), (own,)]
    with pytest.raises(UserError, match=r"^train_dataset.tools: cannot read .*none.json"):
        open_prompts(dataclasses.replace(dataset, tools=str(tmp_path / "none.json")), seed=1)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"messages": [CHAT[0] | {"weight": 1}], "answer": "1"}, "messages[0]: no such key of a message: 'weight'"),
        ({"messages": CHAT[:3], "answer": "1"}, "{}: the chat template has no place for tool_calls"),
        ({"prompt": "a", "answer": "1", "tools": [TOOL]}, "{}: the chat template has no place for tools"),
        (
            {"prompt": "a", "answer": "1", "chat_template_kwargs": {"enable": 1}},
            "chat_template_kwargs.enable: the chat template",
        ),
        ({"messages": CHAT[3:], "chat_template_kwargs": {}}, "messages hold nothing but the answer"),
    ],
)
def test_what_a_template_can_not_take_is_told_by_file_and_line_before_anything_starts(tmp_path, tokenizers, record, line):
    dataset = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"}, record)
    with pytest.raises(UserError) as caught:
        open_prompts(dataset, seed=1, tokenizer=tokenizers["CHATML"])
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:2: " + line.format(tokenizers["CHATML"].directory))


def labels(tokenizer, most, **warmup):
    return Labels(WarmupConfig(**warmup), tokenizer, most=most, why=f"rows have {most}")


@pytest.mark.parametrize("chat", [False, True])
def test_an_example_that_is_too_long_is_refused_or_left_out_and_counted(tmp_path, tokenizers, chat):
    """Whatever of it is long: prompt, answer, calls or tools. Those that fit are never lost."""
    tokenizer = tokenizers["TOOLS"]
    answers = ["7" * size for size in (1, 300, 2, 40, 90)]
    records = [{"prompt": "12+30=", "answer": answer} for answer in answers]
    if chat:
        long = CALL | {"function": {"name": "add", "arguments": {"a": "7" * 300}}}
        records = [{"messages": CHAT, "tools": [TOOL]}] * 2
        records.append({"messages": [CHAT[0], CHAT[1] | {"tool_calls": [long]}, *CHAT[2:]], "tools": [TOOL]})
        records.append({"messages": CHAT, "tools": [{"type": "function", "function": {"name": "7" * 300}}]})
    dataset = write(tmp_path / "a.jsonl", *records)
    lengths = [len(labeled_trajectory(prompt, tokenizer)) for prompt in open_prompts(dataset, seed=1).epoch(0)]
    for most in sorted({*lengths, *(length - 1 for length in lengths)}):
        fits = [f"0/{i}" for i, length in enumerate(lengths) if length <= most]
        counted = dataclasses.replace(dataset, max_length=1000)
        if not fits:
            with pytest.raises(UserError, match=f"^train_dataset: no example fits with its answer: rows have {most}"):
                open_prompts(counted, seed=1, tokenizer=tokenizer, labels=labels(tokenizer, most))
            continue
        source = open_prompts(counted, seed=1, tokenizer=tokenizer, labels=labels(tokenizer, most))
        assert [prompt.uid for prompt in source.epoch(0)] == fits
        assert source.skipped == len(lengths) - len(fits)
        if len(fits) == len(lengths):
            open_prompts(dataset, seed=1, tokenizer=tokenizer, labels=labels(tokenizer, most))
            continue
        first = next(i for i, length in enumerate(lengths) if length > most)
        with pytest.raises(UserError) as caught:
            open_prompts(dataset, seed=1, tokenizer=tokenizer, labels=labels(tokenizer, most))
        assert str(caught.value) == (
            f"{tmp_path}/a.jsonl:{first + 1}: the example has {lengths[first]} tokens: rows have {most}"
            f" (train_dataset.max_length={most} leaves such examples out)"
        )


def test_examples_whose_turns_can_not_be_learned_are_told_by_file_and_line(tmp_path, tokenizers):
    turns = [CHAT[0], {"role": "assistant", "content": "1"}, CHAT[0], {"role": "assistant", "content": "2"}]
    dataset = write(tmp_path / "a.jsonl", {"messages": turns[:2]}, {"messages": turns})
    tokenizer = tokenizers["THINKS"]
    with pytest.raises(UserError, match=r"a.jsonl:2: the chat template renders turn 2 in another way .*warmup.turns=last"):
        open_prompts(dataset, seed=1, tokenizer=tokenizer, labels=labels(tokenizer, 1000))
    last = labels(tokenizer, 1000, turns="last")
    prompts = list(open_prompts(dataset, seed=1, tokenizer=tokenizer, labels=last).epoch(0))
    taught = [tokenizer.decode(t.token_ids[t.loss_mask]) for t in map(last, prompts)]
    assert [text.rpartition("\n")[2] for text in taught] == ["1", "2"]


@pytest.mark.parametrize("room", [10**6, 40])  # tokens: for all, for two
def test_an_example_is_made_once_for_all_epochs_while_there_is_room(tmp_path, tokenizers, monkeypatch, room):
    monkeypatch.setattr(importlib.import_module("rljax.data.labeled"), "KEPT_TOKENS", room)  # a function has its name
    tokenizer = tokenizers["CHATML"]
    records = {name: [{"prompt": f"{name}{i}", "answer": "1"} for i in range(5)] for name in "ab"}
    one, other = (open_prompts(write(tmp_path / f"{name}.jsonl", *records[name]), seed=1) for name in "ab")
    made = labels(tokenizer, 1000)
    prompts = [*one.epoch(0), *one.epoch(1), *other.epoch(1)]
    examples = [made(prompt) for prompt in prompts]
    for prompt, example in zip(prompts, examples, strict=True):  # whatever was kept: its own
        np.testing.assert_array_equal(example.token_ids, labeled_trajectory(prompt, tokenizer).token_ids)
    again = [first is second for first, second in zip(examples[:5], examples[5:10], strict=True)]
    assert again == [room > 40] * 5
    kept = [example for _, example in made._kept.values()]
    assert made._kept_tokens == sum(map(len, kept)) <= max(room, len(examples[-1]))
