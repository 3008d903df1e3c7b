"""Lengths of many prompts: those that bytes decide are not tokenized, and a large selection is remembered."""

import json

import numpy as np
import pytest

from rljax.config.schema import DatasetConfig, WarmupConfig
from rljax.data import Labels, open_prompts
from rljax.data.lengths import PromptLengths
from rljax.errors import UserError
from rljax.hf.tokenizer import HFTokenizer, build_char_tokenizer, load_tokenizer, prompt_ids_of
from rljax.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture
def counted(monkeypatch):
    """Numbers of prompts that were tokenized, call by call."""
    calls = []
    inner = HFTokenizer.prompt_lengths

    def prompt_lengths(self, prompts):
        calls.append(len(prompts))
        return inner(self, prompts)

    monkeypatch.setattr(HFTokenizer, "prompt_lengths", prompt_lengths)
    return calls


def written(path, questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    return DatasetConfig(path=str(path), type="prompt_answer", max_length=60)


def prompts_of(texts):
    return [Prompt(str(i), ({"role": "user", "content": text},), {}) for i, text in enumerate(texts)]


def test_lengths_are_those_of_the_ids(tokenizer):
    texts = ["3+4=", "", "a" * 40, "<unk>", "é ü", "x" * 7]
    prompts = prompts_of([text or " " for text in texts])
    assert tokenizer.prompt_lengths(prompts) == [len(prompt_ids_of(tokenizer, prompt)) for prompt in prompts]


def test_a_prompt_that_bytes_decide_is_not_tokenized(tokenizer, counted):
    texts = ["a" * 9, "b" * 20, "c" * 200, "d" * 22]
    assert PromptLengths(tokenizer, str, 30).of(prompts_of(texts)) == [9, 0, 200, 22]  # 9 and 22 are more than 30
    assert counted == [1, 3]
    assert PromptLengths(tokenizer, str, None).of(prompts_of(texts)) == [9, 0, 0, 0]  # the first, for its template


@pytest.mark.parametrize("most", [8, 25, 26, 60])
def test_what_is_selected_does_not_depend_on_what_is_tokenized(tokenizer, tmp_path, most):
    random = np.random.default_rng(0)
    texts = ["q" * n for n in random.integers(1, 60, 300)]
    expected = [i for i, text in enumerate(texts) if len(text) <= most]
    dataset = written(tmp_path / "a.jsonl", texts)
    found = open_prompts(DatasetConfig(**vars(dataset) | {"max_length": most, "shuffle": False}), seed=0, tokenizer=tokenizer)
    assert [int(prompt.uid.partition("/")[2]) for prompt in found.epoch(0)] == expected
    assert found.skipped == len(texts) - len(expected)


def test_a_selection_is_remembered_until_something_that_decides_it_changes(tokenizer, counted, tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.data.selection.LEAST", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = written(tmp_path / "a.jsonl", ["x" * 70, "y" * 10, "é", "z" * 61])

    def opened(labels=None, **changes):
        counted.clear()
        found = open_prompts(DatasetConfig(**vars(dataset) | changes), seed=0, tokenizer=tokenizer, labels=labels)
        return len(found), found.skipped, sum(counted)

    assert opened()[:2] == (2, 2) and opened() == (2, 2, 0)
    assert opened(max_length=65)[2] > 0 and opened(max_length=65) == (3, 1, 0)
    assert opened(system_prompt="s" * 20)[2] > 0
    assert opened(labels=Labels(WarmupConfig(), tokenizer, most=20, why="a row"))[:2] == (2, 2)
    files = sorted((tmp_path / "cache/rljax/selections").iterdir())
    assert len(files) == 4
    for file in files:
        file.write_bytes(b"torn")
    assert opened()[2] > 0 and opened() == (2, 2, 0)
    written(tmp_path / "a.jsonl", ["x" * 70, "y" * 10, "e", "z" * 61])
    assert opened()[2] > 0


def test_measured_lengths_are_of_every_prompt_that_is_kept_and_are_remembered(tokenizer, counted, tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.data.selection.LEAST", 3)
    monkeypatch.setattr("rljax.data.selection.AT_ONCE", 2)  # more parts than are under way at once
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    questions = ["x" * n for n in (3, 61, 10, 60, 70, 1, 2, 5, 8)]
    dataset = written(tmp_path / "a.jsonl", questions)

    def opened(**how):
        counted.clear()
        return open_prompts(dataset, seed=0, tokenizer=tokenizer, **how)

    for tokenized in (len(questions), 0):
        found = opened(measure=True)
        assert found.lengths.tolist() == [len(q) for q in questions if len(q) <= 60] and sum(counted) == tokenized
        assert [len(prompt.messages[0]["content"]) for prompt in found.every()] == found.lengths.tolist()
    assert opened().lengths is None and sum(counted) == 0  # a start finds what a check has measured


def test_every_prompt_that_is_used_is_seen_once_and_in_order_be_it_remembered_or_not(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.data.selection.LEAST", 3)
    monkeypatch.setattr("rljax.data.selection.AT_ONCE", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = written(tmp_path / "a.jsonl", ["x" * n for n in (3, 61, 10, 60, 70, 1)])
    for _ in ("selected", "remembered"):
        seen = []
        found = open_prompts(dataset, seed=0, tokenizer=tokenizer, seen=seen.append)
        assert [prompt.messages for prompt in seen] == [prompt.messages for prompt in found.every()]
        assert [found.where(prompt.uid) for prompt in seen] == [found.where(prompt.uid) for prompt in found.every()]


def test_a_small_selection_is_not_remembered(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_prompts(written(tmp_path / "a.jsonl", ["y"] * 50), seed=0, tokenizer=tokenizer)
    assert not (tmp_path / "cache").exists()


def test_one_prompt_of_many_that_cannot_be_counted_is_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"a.jsonl:3: the prompt is empty"):
        open_prompts(written(tmp_path / "a.jsonl", ["a", "b", "", "c"]), seed=0, tokenizer=tokenizer)
