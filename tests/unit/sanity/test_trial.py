"""Trial of rewards and filters at the start: which failures end a run, which are a line."""

import asyncio
import logging

import pytest

from rljax.config.schema import RewardConfig
from rljax.errors import PluginFailed, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import RewardPool
from rljax.sanity import trial
from rljax.sanity.trial import RewardTrial, try_filter
from rljax.types import Prompt

REWARDS = """
import os, pathlib, time

def wrong(prompt, completion):
    return float(prompt.fields["solution"] in completion)

def some(prompt, completion):
    return wrong(prompt, completion) if prompt.uid == "0/0" else 1.0

def ids(prompt, completion, prompt_ids, completion_ids, **data):
    return float(completion == bytes(i + 0x20 - 5 for i in completion_ids).decode())

def late(prompt, completion):
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    raise LookupError("too late")

def first_late(prompt, completion):
    if not pathlib.Path("called").exists():
        pathlib.Path("called").touch()
        time.sleep(60)
    return 1.0

def count(prompt, completion):
    with open("calls", "a") as calls:
        calls.write(completion + "\\n")
    return 1.0
"""
PROMPTS = [Prompt(f"0/{i}", ({"role": "user", "content": "?"},), {"answer": "0"}) for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture
def tried(tmp_path, tokenizer, monkeypatch):
    """Returns a function that tries a reward, and the pool's metrics and counts after it."""
    (tmp_path / "made_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    async def run(function, behind=None, timeout=60.0):
        async with RewardPool(RewardConfig(name=f"made_rewards:{function}", workers=1, timeout=timeout)) as rewards:
            one = RewardTrial(rewards, f"made_rewards:{function}", PROMPTS, tokenizer, lambda uid: f"train.jsonl:{uid[-1]}")
            await one.wait()
            if behind is not None:
                await behind()
            await one.close()
            return {name: metric.count for name, metric in rewards.take_metrics().items()}, dict(rewards.counts)

    return lambda *arguments, **keywords: asyncio.run(run(*arguments, **keywords))


def test_a_reward_that_fails_on_every_record_is_one_line_with_function_record_cause_and_place(tried):
    with pytest.raises(PluginFailed) as failed:
        tried("wrong")
    line = str(failed.value)
    assert line.startswith("reward.name: made_rewards:wrong fails on 'The answer is 0.' to train.jsonl:0: KeyError: ")
    assert "no field 'solution'" in line and "(made_rewards.py:5)" in line and "on 2 more records" in line
    assert "in wrong" in "".join(failed.value.__cause__.__notes__)  # what binaries show before the line


def test_a_reward_that_scores_one_of_the_records_is_a_warning(tried, caplog):
    tried("some")
    (record,) = caplog.records
    assert (
        record.levelno == logging.WARNING
        and "made_rewards:some fails on" in record.message
        and "train.jsonl:0" in record.message
    )


def test_of_a_call_that_was_late_once_no_loss_of_episodes_is_foretold(tried, caplog):
    tried("first_late", timeout=0.3)
    (line,) = caplog.messages
    assert "ran longer than 0.3 s" in line and "the record after it was scored" in line and "will be" not in line


def test_a_trial_is_one_call_that_counts_nowhere(tried, tmp_path):
    assert tried("count") == ({}, {})
    assert (tmp_path / "calls").read_text().splitlines() == [trial.COMPLETION]


def test_a_reward_of_token_ids_gets_those_of_the_completion(tried, caplog):
    tried("ids")
    assert not caplog.records


def test_a_late_reward_delays_no_start_and_its_error_is_told(tried, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trial, "PATIENCE", 0.01)
    caplog.set_level(logging.INFO, "rljax")

    async def later():
        (tmp_path / "go").touch()
        async with asyncio.timeout(60):
            while len(caplog.records) < 2:
                await asyncio.sleep(0.01)

    tried("late", later)
    first, second = (record.getMessage() for record in caplog.records)
    assert "has not scored" in first and "LookupError: too late" in second


def test_a_filter_that_returns_no_bool_is_refused_and_one_that_raises_is_told(caplog):
    with pytest.raises(UserError, match="returns NoneType for a made-up group"):
        asyncio.run(try_filter("my:filter", lambda group: None, 4))
    asyncio.run(try_filter("my:filter", lambda group: True, 4))
    assert not caplog.records
    asyncio.run(try_filter("my:filter", lambda group: 1 / 0, 4))
    assert ["ZeroDivisionError" in record.message for record in caplog.records] == [True]
