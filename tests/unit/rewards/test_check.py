"""Records are held against what the rewards read before anything is sampled."""

import asyncio
import json
import logging

import pytest

from rljax.config.schema import DatasetConfig, RewardConfig
from rljax.data import open_prompts
from rljax.errors import UserError
from rljax.rewards import RewardPool
from rljax.rewards.check import Records, check_records


@pytest.fixture
def checked(tmp_path):
    """Checks records against the reward "math"; one process serves all checks."""
    loop, rewards = asyncio.new_event_loop(), RewardPool(RewardConfig("math", workers=1))
    loop.run_until_complete(rewards.start())

    def check(path, records):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        source = open_prompts(DatasetConfig(path=str(path), type="trl"), seed=1)
        loop.run_until_complete(check_records(rewards, Records(list(source.epoch(0)), source.where, source.key)))

    yield check
    loop.run_until_complete(rewards.close())
    loop.close()


def test_golds_that_are_not_understood_are_counted_and_a_missing_field_is_refused(tmp_path, caplog, checked):
    path = tmp_path / "a.jsonl"
    good = [{"prompt": f"{n}", "answer": f"${n}$"} for n in range(130)]  # more than are checked at once
    with caplog.at_level(logging.WARNING):
        checked(path, good)
        assert caplog.records == []
        checked(path, [*good[:70], {"prompt": "x", "answer": "?"}, *good[70:]])
    (said,) = caplog.records
    line = f"reward.name: {path}:71: math: the gold answer '?' is not understood as mathematics"
    assert said.getMessage() == f"{line} (1 of 131 records of train_dataset are like it, and their samples are rejected)"

    with pytest.raises(UserError) as caught:
        checked(path, [*good, {"prompt": "x", "anser": "?"}])
    line = f"reward.name: {path}:131: math reads the field 'answer', and the record has: anser (1 of 131 records of"
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"a\.jsonl:1: math: the gold answer '\?' is not understood .*\(1 of 1 records"):
        checked(path, [{"prompt": "x", "answer": "?"}])
