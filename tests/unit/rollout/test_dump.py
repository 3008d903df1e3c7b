"""A dumped batch loads bit for bit, and what is no dumped batch is one line."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.errors import UserError
from rljax.rollout import dump
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory


class Numbers:
    """A tokenizer whose text is the ids."""

    eos_token_ids = (0,)
    pad_token_id = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        return " ".join(map(str, token_ids))


@st.composite
def trajectories(draw) -> Trajectory:
    length = draw(st.integers(1, 6))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
    logp = draw(st.lists(st.floats(-1e3, 0, width=32), min_size=length, max_size=length))
    return Trajectory(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        loss_mask=mask,
        behavior_logp=np.array(logp, np.float32),
        versions=np.where(mask, draw(st.integers(0, 9)), PROMPT_VERSION).astype(np.int32),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        components=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2)),
        finish=draw(st.sampled_from(Finish)),
    )


groups = st.builds(Group, uid=st.text(max_size=4), trajectories=st.lists(trajectories(), max_size=3).map(tuple))


@given(st.lists(groups, max_size=3))
def test_groups_come_back_bit_for_bit(tmp_path_factory, written):
    directory = tmp_path_factory.mktemp("dump")
    dump.save(directory, written, Numbers())
    read = dump.load(directory)
    assert [group.uid for group in read] == [group.uid for group in written]
    for before, after in zip(written, read, strict=True):
        assert len(before.trajectories) == len(after.trajectories)
        for a, b in zip(before.trajectories, after.trajectories, strict=True):
            for name, dtype in dump.ARRAYS.items():
                assert getattr(b, name).dtype == dtype
                assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
            assert (a.reward, a.components, a.finish) == (b.reward, b.components, b.finish)


def test_what_is_no_dumped_batch_is_one_line(tmp_path):
    def refusal() -> str:
        with pytest.raises(UserError) as raised:
            dump.load(tmp_path)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "no batch.json" in refusal()
    one = Trajectory(
        np.array([1, 2], np.int32), np.array([False, True]), np.zeros(2, np.float32), np.array([-1, 0]), 1.0, {}, Finish.STOP
    )
    dump.save(tmp_path, [Group("0/0", (one,))], Numbers())
    tree = json.loads((tmp_path / "batch.json").read_text())
    tree["groups"][0]["trajectories"][0]["length"] = 3
    (tmp_path / "batch.json").write_text(json.dumps(tree))
    assert "no token_ids of the 3 tokens" in refusal()
    (tmp_path / "batch.json").write_text("{}")
    assert "not of format" in refusal()
    (tmp_path / "batch.json").write_text("{")
    assert "batch.json: not JSON" in refusal()
