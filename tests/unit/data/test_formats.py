"""Data sets as TRL and verl have them, in each kind of file, and the format told by columns."""

import dataclasses
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rljax.config.schema import DatasetConfig
from rljax.data import open_prompts
from rljax.data.formats import told_by_columns
from rljax.errors import UserError

SAVED = Path(__file__).resolve().parents[2] / "data" / "saved_dataset"  # written by datasets 5.2.0, DatasetDict.save_to_disk
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
VERL = {  # a row of verl's gsm8k.py
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": 'What is 2+3? Put the answer after "####".'}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0, "answer": "2+3=5\n#### 5", "question": "What is 2+3?"},
}


def opened(path, form="", **changes):
    dataset = DatasetConfig(path=str(path), type=form, shuffle=False)
    return list(open_prompts(dataclasses.replace(dataset, **changes), seed=1).epoch(0))


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parts(text):
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"prompt": QUESTION, "solution": "5"}, "trl"),
        ({"prompt": "What is 2+3?", "ground_truth": "5"}, "trl"),
        ({"prompt": "What is 2+3?", "completion": "5"}, "trl"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "5"}]}, "trl"),
        ({"prompt": "2+3=", "answer": "5"}, "prompt_answer"),
        ({"prompt": QUESTION, "answer": 5}, "prompt_answer"),
        ({"question": "2+3=", "answer": "five"}, "prompt_answer"),
        ({"question": "2+3=", "answer": "it is\n#### 5"}, "gsm8k"),
        (VERL, "verl"),
    ],
)
def test_the_format_is_told_by_the_columns_and_said_once(tmp_path, caplog, record, form):
    assert told_by_columns(record, "here") == form
    path = lines(tmp_path / "a.jsonl", record, record)
    with caplog.at_level(logging.WARNING):
        told = opened(path)
    (said,) = caplog.records
    assert said.getMessage() == f"train_dataset.type: not set; read as {form!r}, by the columns {', '.join(record)}"
    assert told == opened(path, form)
    assert told[0].messages[-1]["role"] == "user" and "2+3" in told[0].messages[-1]["content"]


@pytest.mark.parametrize(
    ("record", "needed"),
    [({"text": "x", "label": 1}, "a prompt, question or messages"), ({"question": "x"}, "an answer beside the question")],
)
def test_columns_of_no_format_are_refused_with_what_there_is_and_what_is_needed(tmp_path, record, needed):
    columns = ", ".join(record)
    with pytest.raises(UserError, match=rf"a.jsonl:1: its columns are of no format \(it has: {columns}; {needed} is needed\)"):
        opened(lines(tmp_path / "a.jsonl", record))


def test_a_conversational_prompt_is_the_messages_and_stays_a_field():
    (prompt,) = opened(SAVED, split="test")
    assert prompt.messages == ({"role": "user", "content": "What is 4+4?"},)
    assert prompt.fields == {"prompt": [{"role": "user", "content": "What is 4+4?"}], "solution": "8"}


def test_what_save_to_disk_wrote_reads_as_the_same_records_in_json(tmp_path):
    records = [
        {"prompt": [{"role": "user", "content": "What is 2+3?"}], "solution": "5"},
        {"prompt": [{"role": "user", "content": "What is 4+4?"}], "solution": "8"},
    ]
    assert opened(SAVED) == opened(lines(tmp_path / "a.jsonl", *records))
    assert opened(SAVED / "train") == opened(SAVED)  # one Dataset, not a DatasetDict
    assert opened(SAVED / "train" / "data-00000-of-00001.arrow") == opened(SAVED)


def test_shards_of_a_saved_dataset_are_read_in_the_order_of_its_state(tmp_path):
    for name, values in (("b", ["1", "2"]), ("a", ["3"])):
        table = pa.table({"prompt": values, "answer": values})
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": "b.arrow"}, {"filename": "a.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert [p.fields["answer"] for p in opened(tmp_path)] == ["1", "2", "3"]
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(UserError, match=r"state.json names a.arrow, which is not there"):
        opened(tmp_path)
    with pytest.raises(UserError, match=r"has no split 'dev' \(there: train, test; split is train_dataset.split\)"):
        opened(SAVED, split="dev")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_dict.json", {}),
        ("dataset_dict.json", {"splits": None}),
        ("dataset_dict.json", {"splits": "train"}),
        ("state.json", {}),
        ("state.json", {"_data_files": [{}]}),
        ("state.json", {"_data_files": [{"filename": "a.csv"}]}),
    ],
)
def test_a_saved_dataset_whose_json_names_no_files_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(UserError, match=name):
        opened(tmp_path)


def test_columns_that_json_does_not_have_are_read_or_refused_with_their_row(tmp_path):
    path = tmp_path / "a.parquet"
    one = {"prompt": ["a"], "answer": ["1"]}

    def field(values, kind):
        pq.write_table(pa.table({**one, "extra": pa.array(values, kind)}), path)
        return opened(path)[0].fields["extra"]

    assert field([1_000_001], pa.timestamp("ns")) == "1970-01-01 00:00:00.001000"
    assert field([1_000_001], pa.duration("ns")) == "0:00:00.001000"
    assert field(["é".encode()], pa.binary()) == "é"  # text, by a writer that does not say so
    assert field([b"\xff"], pa.binary()) is None
    with pytest.raises(UserError, match=r"a.parquet: row 1: can't be read: OverflowError"):
        field([10**7], pa.date32())


def test_sets_that_were_joined_give_the_prompts_of_each(tmp_path):
    """Null in the columns of the other set changes nothing of a record."""
    says = [{"role": "user", "content": "1+1="}]
    alone, path = [{"prompt": "1+1=", "answer": "2"}, {"messages": says, "answer": "2"}], tmp_path / "a.jsonl"
    for records in (alone, [{"prompt": None, "messages": None} | record for record in alone]):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        prompts = list(opened(path))
        assert [list(prompt.messages) for prompt in prompts] == [says, says]
        assert [dict(prompt.fields) for prompt in prompts] == [{"answer": "2"}, {"answer": "2"}]


def test_a_prompt_in_bytes_is_text_or_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [b"a"], "answer": [b"1"]}), path)
    (prompt,) = opened(path)
    assert (prompt.messages[0]["content"], prompt.fields["answer"]) == ("a", "1")
    pq.write_table(pa.table({"prompt": [b"\xff"], "answer": [b"1"]}), path)
    with pytest.raises(UserError, match=r"row 1: field 'prompt' is null, not text or a list of messages"):
        opened(path)


def test_an_arrow_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"a\.arrow: not an Arrow file"):
        opened(tmp_path / "a.arrow")


def test_content_parts_are_the_text_they_hold(tmp_path):
    in_parts = [{**message, "content": parts(message["content"])} for message in QUESTION]
    twice = [{"role": "user", "content": [*parts("What is "), *parts("2+3?")]}]
    split, whole, joined = (opened(lines(tmp_path / f"{i}.jsonl", {"prompt": p, "solution": "5"}))[0].messages
                            for i, p in enumerate((in_parts, QUESTION, twice)))  # fmt: skip
    assert split == whole == tuple(QUESTION) and joined == tuple(QUESTION[1:])


def test_pairs_of_prompt_and_completion_have_the_completion_as_answer(tmp_path):
    reply = {"role": "assistant", "content": "5"}
    for record in (
        {"prompt": "What is 2+3?", "completion": "5"},
        {"prompt": QUESTION[1:], "completion": [reply]},
        {"messages": [QUESTION[1], reply]},
    ):
        (prompt,) = opened(lines(tmp_path / "a.jsonl", record))
        assert prompt.messages == (QUESTION[1],) and prompt.fields["answer"] == "5"
        assert "completion" not in prompt.fields


def test_a_list_of_messages_that_older_datasets_made_columns_of_is_read(tmp_path):
    columns = {key: [message[key] for message in QUESTION] for key in ("role", "content")}
    assert opened(lines(tmp_path / "a.jsonl", {"prompt": columns}))[0].messages == tuple(QUESTION)


def test_rows_of_verl_keep_every_column_and_name_the_ground_truth(tmp_path):
    pq.write_table(
        pa.Table.from_pylist([VERL, {**VERL, "reward_model": {"style": "rule", "ground_truth": "6"}}]),
        tmp_path / "train.parquet",
    )
    first, second = opened(tmp_path)
    assert first.messages == tuple(VERL["prompt"]) and first.fields.items() >= VERL.items()
    assert (first.fields["ground_truth"], first.fields["answer"]) == ("5", "5") and second.fields["ground_truth"] == "6"
    targets = {**VERL, "reward_model": {"style": "rule", "ground_truth": {"target": ["5", "five"]}}}
    (several,) = opened(lines(tmp_path / "a.jsonl", targets))
    assert several.fields["ground_truth"] == {"target": ["5", "five"]} and "answer" not in several.fields
    with pytest.raises(UserError, match=r"a.jsonl:1: no reward_model.ground_truth \(it has: data_source, prompt"):
        opened(lines(tmp_path / "a.jsonl", {**VERL, "reward_model": {"style": "model"}}))


def test_a_mark_of_utf8_is_no_part_of_the_first_record(tmp_path):
    plain, marked, parted = tmp_path / "plain.jsonl", tmp_path / "marked.jsonl", tmp_path / "empty_line.jsonl"
    text = '{"prompt": "é", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n'
    plain.write_text(text, "utf-8")
    marked.write_text(text, "utf-8-sig")
    parted.write_text("\n" + text, "utf-8-sig")
    assert opened(marked) == opened(plain) == opened(parted)


@pytest.mark.parametrize("escaped", [r"\ud83d", r"a\udc00b", r"\udc00\ud83d"])
@pytest.mark.parametrize("place", ['{"prompt": "%s", "answer": "1"}', '{"prompt": "a", "answer": "1", "extra": [{"%s": 1}]}'])
def test_a_surrogate_that_stands_alone_is_no_text(tmp_path, escaped, place):
    good = place % r"\ud83d\ude00"
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{place % escaped}\n")
    with pytest.raises(UserError, match=r"a.jsonl:2: not text: the surrogate '\\ud[8c]") as caught:
        opened(path)
    str(caught.value).encode()
    path.write_text(good)
    assert len(opened(path)) == 1


def test_json_that_is_nested_without_end_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": ' + "[" * 200_000)
    with pytest.raises(UserError, match=r"a\.jsonl:1: not JSON"):
        opened(tmp_path / "a.jsonl")


def test_a_format_that_is_async_is_refused(tmp_path, monkeypatch):
    (tmp_path / "async_format.py").write_text("async def f(record, where):\n    return (), {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"train_dataset\.type: async_format:f is async, and a format is called"):
        opened(lines(tmp_path / "a.jsonl", {"prompt": "a"}), "async_format:f")


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"messages": [*QUESTION, {"role": "assistant", "content": "5"}]}, "messages"),
        ({"prompt": QUESTION, "answer": "5"}, "prompt"),
        ({"prompt": QUESTION, "completion": [{"role": "assistant", "content": "5"}]}, "prompt"),
        ({"prompt": QUESTION, "completion": [{"role": "assistant", "content": "5"}]}, "completion"),
        (VERL, "prompt"),
        (VERL, "reward_model"),
        (VERL, "extra_info"),
    ],
)
def test_a_column_that_holds_json_text_reads_as_what_the_text_says(tmp_path, record, column):
    plain = opened(lines(tmp_path / "plain.jsonl", record))
    written = opened(lines(tmp_path / "text.jsonl", record | {column: json.dumps(record[column])}))
    assert written == plain


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"messages": "What is 2+3?", "answer": "5"}, "messages is text, and no JSON list of messages"),
        ({"messages": '[{"content": "2+3"}]', "answer": "5"}, "messages is text, and no JSON list of messages"),
        (VERL | {"reward_model": "5"}, "reward_model is text, and no JSON object"),
    ],
)
def test_text_that_is_no_conversation_is_refused_where_one_is_needed(tmp_path, record, line):
    with pytest.raises(UserError, match=rf"train.jsonl:1: {line}"):
        opened(lines(tmp_path / "train.jsonl", record))


def test_a_prompt_that_speaks_of_json_stays_text(tmp_path):
    text = '[{"role": "user"}] is what? And ["a"]?'
    (prompt,) = opened(lines(tmp_path / "train.jsonl", {"prompt": text, "answer": "5"}))
    assert prompt.messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_of_one_name_are_refused_by_it(tmp_path, suffix):
    table = pa.Table.from_arrays([pa.array(["2+3="]), pa.array(["7"]), pa.array(["5"])], names=["prompt", "answer", "answer"])
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(UserError, match=rf"train.{suffix}: two columns are called 'answer'"):
        opened(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "2+3=", "answer": "5", "answer": "6"}',
        '{"prompt": "2+3=", "answer": "5", "more": [{"answer": 1, "answer": 2}]}',
    ],
)
def test_a_key_that_stands_twice_in_a_record_is_refused_by_it(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"train.jsonl:2: the key 'answer' stands twice in an object"):
        opened(path)
