"""The stream of prompts: each once an epoch, resumable anywhere, and one clear line for each kind
of bad input.
"""

import dataclasses
import json
import sys
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from rljax.config import files
from rljax.config.schema import ActorConfig, DatasetConfig, WarmupConfig
from rljax.data import Labels, formats, labeled, open_prompts
from rljax.data import prompts as prompts_module
from rljax.errors import UserError
from rljax.hf.model_directory import prepare_model_directory
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer

DEFAULTS = DatasetConfig(
    path="",
    type="prompt_answer",
    split="train",
    batch_size=4,
    shuffle=True,
    max_length=None,
    limit=None,
    system_prompt="",
    task={},
)


def config(path, **changes):
    return dataclasses.replace(DEFAULTS, path=str(path), **changes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def eleven(tmp_path_factory):
    """Eleven records whose prompts have 1 to 11 characters."""
    records = [{"prompt": "x" * (i + 1), "answer": i, "extra": [i]} for i in range(11)]
    return write(tmp_path_factory.mktemp("data") / "eleven.jsonl", records)


@pytest.fixture(scope="module")
def hundreds(tmp_path_factory):
    """Three hundred records whose prompts have 1 to 11 characters."""
    records = [{"prompt": "x" * (i % 11 + 1), "answer": i} for i in range(300)]
    return write(tmp_path_factory.mktemp("data") / "hundreds.jsonl", records)


def uids(prompts, count):
    return [next(prompts).uid for _ in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_prompt_once_in_its_own_order(eleven, shuffle):
    prompts = open_prompts(config(eleven, shuffle=shuffle), seed=3)
    assert len(prompts) == 11
    epochs = [uids(prompts, 11) for _ in range(4)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(f"{number}/{i}" for i in range(11))
    orders = {tuple(uid.partition("/")[2] for uid in epoch) for epoch in epochs}
    assert len(orders) == (4 if shuffle else 1)
    other = open_prompts(config(eleven, shuffle=shuffle), seed=4)
    ahead = [{uid.partition("/")[2]: i for i, uid in enumerate(uids(other, 11))} for _ in range(4)]
    places = {tuple(sorted(epoch, key=epoch.get)) for epoch in ahead}
    assert (orders & places == set()) == shuffle  # another seed shares no epoch with this one, not even a later one


@hypothesis.given(
    position=st.integers(0, 700),
    max_length=st.sampled_from([None, 3, 10]),
    limit=st.sampled_from([None, 200]),
    shard=st.sampled_from([(0, 1), (1, 3)]),
)
@hypothesis.settings(max_examples=12, deadline=None)
def test_resume_position_is_exact_anywhere_whatever_the_lengths(hundreds, tokenizer, position, max_length, limit, shard):
    dataset = config(hundreds, max_length=max_length, limit=limit)
    straight, resumed = (open_prompts(dataset, seed=3, tokenizer=tokenizer, shard=shard) for _ in range(2))
    uids(straight, position)
    resumed.restore(json.loads(json.dumps(straight.state())))
    assert uids(straight, 250) == uids(resumed, 250)
    assert straight.state() == resumed.state()
    too_long = sum(i % 11 + 1 > (max_length or 11) for i in range(limit or 300))
    assert straight.skipped == resumed.skipped == too_long


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shards_share_an_epoch_between_them_and_lose_none(eleven, count):
    sources = [open_prompts(config(eleven), seed=3, shard=(i, count)) for i in range(count)]
    for epoch in range(3):
        seen = Counter(uid for source in sources for uid in uids(source, len(source)))
        assert seen == Counter(f"{epoch}/{i}" for i in range(11))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 5, 11, 12, 27])
def test_the_shares_of_a_batch_are_its_prompts(eleven, count, size):
    whole = Counter(uids(open_prompts(config(eleven), seed=3), size))
    sources = [open_prompts(config(eleven), seed=3, shard=(i, count)) for i in range(count)]
    assert sum((Counter(uids(source, source.share(size))) for source in sources), Counter()) == whole


def test_a_prompt_is_found_again_by_its_uid_and_an_epoch_leaves_the_stream_alone(eleven, tokenizer):
    prompts = open_prompts(config(eleven, max_length=10), seed=3, tokenizer=tokenizer)
    given = [next(prompts) for _ in range(23)]
    state = prompts.state()
    assert [prompts.prompt(p.uid) for p in given] == given
    assert list(prompts.epoch(1)) == given[10:20]
    assert prompts.state() == state
    for unknown in ("0/10", "0/11", "x", "0/-1"):  # index 10 is too long and never in the stream
        with pytest.raises(UserError, match="no prompt"):
            prompts.prompt(unknown)


def test_a_state_of_other_data_is_refused_and_names_what_changed(eleven, tokenizer, tmp_path):
    base = open_prompts(config(eleven), seed=3)
    for other, name in (
        (open_prompts(config(eleven), seed=4), "seed"),
        (open_prompts(config(eleven, shuffle=False), seed=3), "shuffle"),
        (open_prompts(config(eleven, limit=5), seed=3), "prompts"),
        (open_prompts(config(eleven, max_length=5), seed=3, tokenizer=tokenizer), "prompts"),
        (open_prompts(config(eleven), seed=3, shard=(0, 2)), "shard"),
        (open_prompts(config(write(tmp_path / "a.jsonl", [{"prompt": "y", "answer": "y"}] * 11)), seed=3), "data"),
    ):
        remedy = "set it back" if name == "seed" else "restore the data"
        with pytest.raises(UserError, match=rf"train_dataset: cannot resume: {name} was .* \({remedy}, or"):
            other.restore(base.state())


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path):
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"question": f"q{i}", "answer": f"a{i}", "level": i, "day": datetime.date(2024, 1, i + 1)} for i in range(5)]
    write(tmp_path / "train.jsonl", [{**row, "day": str(row["day"])} for row in rows])
    for name, part in (("test-00000-of-00002", rows[:2]), ("test-00001-of-00002", rows[2:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    lines = open_prompts(config(tmp_path, split="train"), seed=1)
    table = open_prompts(config(tmp_path, split="test"), seed=1)
    assert list(lines.epoch(0)) == list(table.epoch(0))
    assert next(table).fields.keys() == {"question", "answer", "level", "day"}


def sharded(directory, *names):
    """Empty-handed files: what is missing is told before one is read."""
    for name in names:
        (directory / f"{name}.parquet").write_bytes(b"")
    return config(directory)


def test_the_shards_that_are_missing_are_named(tmp_path):
    names = [f"train-{i:05d}-of-00012" for i in range(12)]
    for lacking in ([1], [0, 11], [2, 3, 5, 7, 8]):
        directory = tmp_path / str(len(lacking))
        directory.mkdir()
        present = [name for i, name in enumerate(names) if i not in lacking]
        with pytest.raises(UserError) as error:
            open_prompts(sharded(directory, *present), seed=1)
        assert f"{len(present)} of 12 shards; missing {names[lacking[0]]}.parquet" in str(error.value)
        told = [name for name in names if name in str(error.value)]
        assert told == [names[i] for i in lacking][:3]
        assert ("and 2 more" in str(error.value)) == (len(lacking) == 5)


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002", "train-00001-of-00002", "train-00000-of-00001"),
        ("train-00000-of-00001", "train-00001-of-00001"),
        ("train-00000-of-00001-0a1b2c", "train-00000-of-00001-3d4e5f"),
    ],
)
def test_shards_of_two_numberings_are_refused(tmp_path, names):
    with pytest.raises(UserError, match=r"^train_dataset\.path: .* files of two shardings of one split, such as train-0"):
        open_prompts(sharded(tmp_path, *names), seed=1)


def test_files_of_a_split_without_numbers_of_shards_are_read_as_before(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("train-old", "train-new"):
        pq.write_table(pa.Table.from_pylist([{"question": name, "answer": "1"}]), tmp_path / f"{name}.parquet")
    assert len(open_prompts(config(tmp_path), seed=1)) == 2


def test_formats_of_chat_records_and_system_prompts(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "c.jsonl", [{"messages": chat}, {"messages": own, "answer": 7, "x": 1}, {"prompt": "p", "answer": ""}]
    )
    first, second, third = open_prompts(config(path, shuffle=False, system_prompt="Be brief."), seed=1).epoch(0)
    assert [m["content"] for m in first.messages] == ["Be brief.", "hi"] and first.fields == {"answer": "ho"}
    assert [m["content"] for m in second.messages] == ["own", "hi"] and second.fields == {"answer": "7", "x": 1}
    assert [m["content"] for m in third.messages] == ["Be brief.", "p"] and third.fields == {"answer": ""}


def test_blank_lines_are_no_records_and_a_last_line_needs_no_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a", "answer": "1"}\n\n  \n{"prompt": "é\\n", "answer": "2"}')
    prompts = list(open_prompts(config(path, shuffle=False), seed=1).epoch(0))
    assert [(p.uid, p.messages[0]["content"]) for p in prompts] == [("0/0", "a"), ("0/1", "é\n")]


def test_the_users_own_format(tmp_path, monkeypatch):
    (tmp_path / "own_format.py").write_text(
        "def f(record, where):\n    return ({'role': 'user', 'content': record['q']},), {'n': 1}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = open_prompts(config(write(tmp_path / "a.jsonl", [{"q": "Q"}]), type="own_format:f"), seed=1)
    assert next(prompts).messages[0]["content"] == "Q"


GOOD = '{"prompt": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "changes", "line"),
    [
        (
            None,
            "",
            {},
            "train_dataset.path: no such file: {} "
            "(a directory with train.jsonl and test.jsonl, a .jsonl, .parquet or .arrow file, or what datasets' save_to_disk "
            "wrote; nothing is fetched from a hub)",
        ),
        ("a.jsonl", "", {}, "train_dataset.path: empty file: {}"),
        ("a.jsonl", "\n\n", {}, "train_dataset.path: no records in {}"),
        ("a.csv", "x", {}, "train_dataset.path: {} is neither .jsonl nor .parquet nor .arrow"),
        ("a.parquet", "not one", {}, "{}: not a parquet file"),
        ("a.jsonl", GOOD + "\n{oops}\n", {}, "{}:3: not JSON: "),
        ("a.jsonl", GOOD + '{"answer": \n', {}, "{}:2: not JSON: Expecting value at column 12"),
        ("a.jsonl", GOOD + "[1]\n", {}, "{}:2: a JSON list, not an object"),
        ("a.jsonl", GOOD + '{"prompt": "a", "anser": "1"}', {}, "{}:2: no field 'answer' (it has: prompt, anser)"),
        ("a.jsonl", '{"prompt": "a", "answer": NaN}', {}, "{}:1: field 'answer' is nan, not text"),
        ("a.jsonl", '{"prompt": "a", "answer": %s}' % ("9" * 5000), {}, "{}:1: not JSON that can be read: Exceeds the limit"),
        (
            "a.jsonl",
            '{"promt": "a", "answer": "1"}',
            {},
            "{}:1: none of the fields messages, prompt, question (it has: promt, answer)",
        ),
        ("a.jsonl", '{"prompt": null, "answer": "1"}', {}, "{}:1: field 'prompt' is null, not text or a list of messages"),
        (
            "a.jsonl",
            '{"prompt": null, "messages": null, "answer": "1"}',
            {},
            "{}:1: the fields messages and prompt are null, not text or a list of messages",
        ),
        ("a.jsonl", GOOD + '{"prompt": "", "answer": "1"}', {}, "{}:2: the prompt is empty, "),
        ("a.jsonl", '{"messages": [{"role": "user"}], "answer": "1"}', {}, "{}:1: messages[0]: a message needs role"),
        ("a.jsonl", '{"messages": [], "answer": "1"}', {}, "{}:1: messages must be a list"),
        ("a.jsonl", GOOD, {"type": "gsm8k"}, "{}:1: no field 'question' (it has: prompt, answer)"),
        ("a.jsonl", '{"question": "a", "answer": "72"}', {"type": "gsm8k"}, "{}:1: the answer has no line '#### N'"),
        ("a.jsonl", GOOD, {"type": "gsm8"}, "train_dataset.type: no format named 'gsm8' (did you mean gsm8k"),
        ("a.jsonl", GOOD, {"type": "task"}, "train_dataset.type: 'task' needs a path such as task:addition"),
        ("a.jsonl", GOOD, {"limit": 0}, "train_dataset.limit: 0 leaves no example"),
        ("a.jsonl", GOOD, {"max_length": 0}, "train_dataset.max_length: every prompt is longer than 0 tokens"),
    ],
)
def test_bad_input_is_one_line_with_the_culprit_and_the_remedy(tmp_path, tokenizer, name, content, changes, line):
    path = tmp_path / (name or "missing.jsonl")
    if name is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        open_prompts(config(path, **changes), seed=1, tokenizer=tokenizer)
    assert str(caught.value).startswith(line.format(path)) and "\n" not in str(caught.value)


def test_characters_that_the_model_can_not_see_are_told_once_with_file_and_line(tmp_path, tokenizer, caplog):
    path = tmp_path / "a.jsonl"
    questions = ["1+1=", "2\u00d73=", "4+4=", "5\u00f75="]
    path.write_text("".join(json.dumps({"prompt": question, "answer": "2"}) + "\n" for question in questions))
    assert len(open_prompts(config(path), seed=3, tokenizer=tokenizer)) == len(questions)
    (record,) = caplog.records
    assert f"{path}:2: " in record.getMessage() and "'\u00d7', as 1 more prompts have such" in record.getMessage()
    caplog.clear()
    open_prompts(config(path, limit=1), seed=3, tokenizer=tokenizer)
    assert not caplog.records


def test_a_task_minds_its_type(tokenizer):
    def opened(word):
        return open_prompts(dataclasses.replace(config("task:addition"), type=word), seed=1, tokenizer=tokenizer)

    with pytest.raises(UserError, match=r"train_dataset\.type: no format named 'promt_answer' \(did you mean prompt_answer"):
        opened("promt_answer")
    with pytest.raises(UserError, match=r"no field 'question'"):
        opened("gsm8k")
    assert len(opened("task")) == len(opened("prompt_answer"))


@pytest.mark.parametrize(
    ("body", "fault"),
    {
        "raises": ("return [{'role': 'user', 'content': record['q']}], {'a': record['missing']}", "KeyError: 'missing'"),
        "messages alone": ("return [{'role': 'user', 'content': record['q']}]", "ValueError: not enough values"),
        "no content": ("return [{'role': 'user', 'content': None}], {}", "messages[0]: a message needs role and content"),
        "no mapping": ("return ['hello'], {}", "messages[0]: a message needs role and content"),
    }.values(),
)
def test_a_record_that_the_users_format_cannot_read_is_told_by_file_and_line(tmp_path, monkeypatch, tokenizer, body, fault):
    (tmp_path / "their_format.py").write_text(f"def form(record, where):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_format", raising=False)
    path = write(tmp_path / "train.jsonl", [{"q": "1+1="}, {"q": "1+2="}])
    with pytest.raises(UserError) as caught:
        uids(open_prompts(config(path, type="their_format:form"), seed=1, tokenizer=tokenizer), 2)
    message = str(caught.value)
    assert "train.jsonl:1: " in message or "train.jsonl:2: " in message
    assert fault in message and "\n" not in message


def test_a_field_to_train_on_is_looked_for_in_every_record_before_anything_starts(tmp_path, tokenizer):
    records = [{"prompt": "a", "answer": "1", "solution": "x"}, {"prompt": "b", "answer": "1", "solution": None}]
    path = write(tmp_path / "a.jsonl", records)

    def opened(field, **changes):
        labels = Labels(WarmupConfig(field=field), tokenizer, most=100, why="")
        return open_prompts(config(path, **changes), seed=1, tokenizer=tokenizer, labels=labels)

    line = rf"warmup\.field: {path}:2 has no text 'solution' to train on \(its fields: answer, solution\)"
    with pytest.raises(UserError, match=line):
        opened("solution")
    assert len(opened("answer")) == 2 and len(opened("solution", limit=1)) == 1


@pytest.mark.parametrize(("own", "limit", "passes"), [(True, 50, 1), (False, 50, 3), (True, 49, 3)])
def test_prompts_of_a_task_are_made_once_and_are_still_the_callers_own(own, limit, passes, monkeypatch):
    """Makes them anew for a user's format, which may draw at random, and for a task too large."""
    made = Counter()

    def form(record, where):
        made[where] += 1
        return formats.prompt_answer(record, where)

    monkeypatch.setattr(prompts_module, "find_format", lambda name, key: form)
    monkeypatch.setattr(prompts_module, "KEPT_PROMPTS", limit)
    settings = config("task:addition", type="task" if own else "theirs:form", task={"n": 50}, shuffle=False)
    source = open_prompts(settings, seed=0)
    before = list(source.epoch(1))
    for prompt in before:
        prompt.messages[0]["content"] = prompt.fields["answer"] = "spoilt"
    after = list(source.epoch(1))
    assert set(made.values()) == {passes} and len(made) == 50
    monkeypatch.undo()
    assert after == list(open_prompts(dataclasses.replace(settings, type="task"), seed=0).epoch(1))


@pytest.mark.parametrize("most", [None, 8])
def test_labeled_examples_of_an_open_source_are_those_of_its_dataset_opened_again(most, eleven, tokenizer, monkeypatch):
    settings = config(eleven, max_length=most)
    labels = Labels(WarmupConfig(field="answer"), tokenizer, most=100, why="")
    prompts = open_prompts(settings, seed=0, tokenizer=tokenizer)
    again = open_prompts(settings, seed=1, tokenizer=tokenizer, labels=labels)
    monkeypatch.setattr(prompts_module, "open_records", None)  # nothing is opened
    like = open_prompts(settings, seed=1, tokenizer=tokenizer, labels=labels, like=prompts)
    assert like.identity == again.identity and like.skipped == again.skipped
    assert list(like.epoch(2)) == list(again.epoch(2))


@pytest.mark.parametrize("lengths", [[1, 300, 2], [40, 5], [500, 600, 700]])
def test_prompts_that_are_too_long_are_found_by_their_tokens(tmp_path, tokenizer, lengths):
    path = write(tmp_path / "a.jsonl", [{"prompt": "7" * n, "answer": "1"} for n in lengths])
    prompts = open_prompts(config(path), seed=1, tokenizer=tokenizer)
    tokens = [len(tokenizer.apply_chat_template(p.messages)) for p in sorted(prompts.epoch(0), key=lambda p: p.uid)]
    for most in sorted({1, *tokens, *(n - 1 for n in tokens)} - {0}):
        long = [i for i, n in enumerate(tokens) if n > most]
        if not long:
            prompts.require_fit(tokenizer, most=most, why="no room")
            continue
        with pytest.raises(UserError) as info:
            prompts.require_fit(tokenizer, most=most, why="no room")
        others = f" (and {len(long) - 1} more are too long)" if len(long) > 1 else ""
        first = f"train_dataset.max_length: None, and {path}:{long[0] + 1} has {tokens[long[0]]} tokens{others}: no room"
        assert str(info.value) == f"{first} (train_dataset.max_length={most} leaves such prompts out)"


@pytest.mark.parametrize("long", [0, 1, 3])
def test_what_max_length_leaves_out_is_counted_and_said(tmp_path, tokenizer, caplog, long):
    rows = [{"prompt": "7" * (300 if i < long else 3), "answer": "1"} for i in range(5)]
    prompts = open_prompts(config(write(tmp_path / "a.jsonl", rows), max_length=100), seed=1, tokenizer=tokenizer)
    assert (prompts.skipped, len(prompts)) == (long, 5 - long)
    said = f"train_dataset: {long} of 5 prompts are longer than 100 tokens"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == ([("WARNING", said)] if long else [])


@pytest.mark.parametrize("path", ["~/x.jsonl", "~me"])
def test_a_path_with_a_tilde_that_nobody_expands_says_so(tmp_path, path):
    why = r"\(~ stands for no home directory in a config: write"
    with pytest.raises(UserError, match=rf"no such file: {path} {why}"):
        open_prompts(config(path), seed=1)
    with pytest.raises(UserError, match=rf"no config.json in {path} {why}"):
        prepare_model_directory(ActorConfig(path=path, init_from_scratch=False), tmp_path, seed=1)
    with pytest.raises(UserError, match=rf"--config: no such file: {path} {why}"):
        files.find(path)


def test_a_directory_without_a_file_says_that_it_is_empty_or_has_no_such_kind(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UserError, match=r"d.jsonl has no train.jsonl or train.parquet \(it is empty; split is"):
        open_prompts(config(tmp_path / "d.jsonl"), seed=1)
    (tmp_path / "d.jsonl" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"\(there: no .arrow, .jsonl, .parquet file; split is"):
        open_prompts(config(tmp_path / "d.jsonl"), seed=1)


def test_a_directory_without_the_split_says_what_it_has(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "1"}])
    with pytest.raises(
        UserError, match=r"has no dev.jsonl or dev.parquet \(there: train.jsonl; split is train_dataset.split\)"
    ):
        open_prompts(config(tmp_path, split="dev"), seed=1)
    with pytest.raises(UserError, match="1 prompts are too few for 2 processes"):
        open_prompts(config(tmp_path), seed=1, shard=(0, 2))


def test_padding_is_eos_in_labeled_targets_trains_the_eos_and_nothing_of_the_prompt(tokenizer):
    prompts = open_prompts(config("task:addition", task={"n": 5}), seed=1)
    expected = list(prompts.epoch(0))
    for prompt, trajectory in zip(expected, labeled(prompts, tokenizer), strict=False):
        text = prompt.messages[0]["content"] + prompt.fields["answer"]
        assert trajectory.token_ids.tolist() == [*tokenizer.encode(text), tokenizer.eos_token_id]
        target = len(prompt.fields["answer"]) + 1
        assert trajectory.loss_mask.tolist() == [False] * (len(text) + 1 - target) + [True] * target
    with pytest.raises(UserError, match=r"warmup.field: prompt .* has no field 'solution'"):
        next(labeled(prompts, tokenizer, "solution"))


def test_gsm8k_on_the_real_files(gsm8k_dir):
    for split, count in (("train", 7473), ("test", 1319)):
        prompts = open_prompts(config(gsm8k_dir, type="gsm8k", split=split), seed=1)
        assert len(prompts) == count  # Cobbe et al. 2021
        for prompt in prompts.epoch(0):
            assert prompt.fields["answer"].endswith(prompt.fields["answer"].rpartition("#### ")[2])
            assert float(prompt.fields["final"]) == int(prompt.fields["final"])  # every one is a whole number


def test_gsm8k_rewards_its_own_solutions(gsm8k_dir):
    from rljax.rewards import mathematics

    prompts = list(open_prompts(config(gsm8k_dir, type="gsm8k", split="test", limit=60), seed=1).epoch(0))
    for prompt, other in zip(prompts, prompts[1:] + prompts[:1], strict=True):
        assert mathematics.gsm8k_reward(prompt, prompt.fields["answer"])["reward"] == 1.0
        same = prompt.fields["final"] == other.fields["final"]
        assert mathematics.gsm8k_reward(prompt, other.fields["answer"])["reward"] == float(same)
