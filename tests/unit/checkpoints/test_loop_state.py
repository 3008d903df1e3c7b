"""A checkpoint's loop.json: what is written is read, in the form that checkpoints have had so far."""

import dataclasses
import json

import pytest

from rljax.checkpoints.loop_state import Saved
from rljax.errors import UserError
from rljax.rollout.buffer import Buffer
from rljax.testing.harness import Numbers

# As written before there was a type for it: a flat object of the loop's fields and the buffer's.
FLAT = """{"supervised_steps": 20, "labeled": {"position": 320}, "epochs": 1, "guard": {"lr_factor": 0.5, "undone": [[4, 7]]},
"accumulator": {"counts": {"generated_tokens": 96, "rollout/wait/learner": 3.5e-05}, "values": {"reward": [1.0, 0.0]},
"shares": {"reuse": [3, 4]}}, "written": {"finished": 8}, "book": {"version": 2, "undone": 0, "drawn": 9, "consumed": 8,
"counts": {"finished": 8, "rejected": 1}, "source": {"position": 9}, "pending": [{"index": 8, "prompt": {"uid": "0/8",
"fields": {"index": 8}}, "attempt": 1, "failures": 0}]}, "ready": 3}"""


def read(tmp_path, text):
    (tmp_path / "loop.json").write_text(text)
    return Saved.read(tmp_path / "loop.json")


def test_a_checkpoint_of_before_goes_on(tmp_path):
    saved, flat = read(tmp_path, FLAT), json.loads(FLAT)
    assert dataclasses.asdict(saved.loop) | {"book": saved.book, "ready": saved.ready} == flat
    buffer = Buffer(Numbers(12), None)
    buffer.restore(saved.book, [])
    assert buffer.version == flat["book"]["version"]
    assert [ticket["prompt"]["uid"] for ticket in buffer.state()["pending"]] == ["0/8"]


def test_a_release_of_before_goes_on_from_what_is_written(tmp_path):
    assert json.loads(read(tmp_path, FLAT).to_json()) == json.loads(FLAT)


def test_a_checkpoint_from_before_there_were_rollbacks_is_as_it_was(tmp_path):
    flat = json.loads(FLAT)
    del flat["guard"]
    saved = read(tmp_path, json.dumps(flat))
    assert saved.loop.guard is None and json.loads(saved.to_json()) == flat


@pytest.mark.parametrize("field", [name for name in json.loads(FLAT) if name != "guard"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, field):
    flat = json.loads(FLAT)
    with pytest.raises(UserError, match=rf"^\S+/loop\.json: no '{field}'$"):
        read(tmp_path, json.dumps({name: value for name, value in flat.items() if name != field}))
    with pytest.raises(UserError, match=rf"^\S+/loop\.json\.{field} must be [^\n]+, not \"x\"$"):
        read(tmp_path, json.dumps(flat | {field: "x"}))
