"""The run directory: what is on disk after writes, kills and resumes."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.config import io as config_io
from rljax.config.schema import StatsLoggerConfig
from rljax.configs import base
from rljax.diagnosis import History
from rljax.errors import UserError
from rljax.json_lines import cut
from rljax.metrics.guardrails import Event
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean
from rljax.sinks import RunState, Sinks, Status
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("metrics.jsonl", Path.mkdir),
        ("metrics.jsonl", os.mkfifo),
        ("log.txt", os.mkfifo),
        ("status.json", Path.mkdir),
        ("metrics.00000099.jsonl", Path.mkdir),
        ("eval_samples.00000099.jsonl", os.mkfifo),
        ("journal", Path.touch),
        ("export", Path.touch),
        ("export", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_what_has_the_place_of_a_file_or_folder_is_named_at_the_start(tmp_path, name, make):
    make(tmp_path / name)
    for _ in range(2):  # the lock is let go of
        with pytest.raises(UserError, match=rf"^--workdir: {tmp_path / name} is no (file|directory).*move it away"):
            RunDirectory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", name]


def test_other_names_and_links_to_the_right_kind_are_let_be(tmp_path):
    (tmp_path / "metrics.old.jsonl").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "export").symlink_to("elsewhere")
    RunDirectory(tmp_path).close()


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_ids = (0,)
    pad_token_id = 0

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(map(chr, token_ids))

    def pieces(self, token_ids):
        return [chr(i) for i in token_ids]

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        return self.encode("".join(m["content"] for m in messages))


ADVANTAGE = np.array([9.0] * 4 + [0.5, 0.5, 9.0, -1 / 3])  # 9: of tokens that are not trained on


def sink_of(run: RunDirectory, first_step: int = 0, samples_per_step: int = 4) -> RunDirectorySink:
    return RunDirectorySink(run, Letters(), first_step=first_step, logger=StatsLoggerConfig(samples_per_step=samples_per_step))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trajectory() -> Trajectory:
    ids = np.array([ord(c) for c in "1+2=3?!3"], np.int32)
    versions = np.array([PROMPT_VERSION] * 4 + [5, 6, PROMPT_VERSION, 6], np.int32)
    return Trajectory(
        token_ids=ids,
        loss_mask=versions >= 0,
        behavior_logp=np.zeros(8, np.float32),
        versions=versions,
        reward=1.0,
        components={"exact": 1.0, "format": float("nan")},
        finish=Finish.STOP,
    )


def test_a_line_a_step_and_writes_of_a_step_merge(tmp_path):
    sink = sink_of(RunDirectory(tmp_path))
    sink.write(1, {"a": Mean(6.0, 3), "empty": Mean(0.0, 0)})
    sink.write(1, {"a": Mean(4.0, 1), "b": Mean.of([1.0, 3.0])})
    sink.write(2, {"a": Mean(1.0, 1)})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 2.5, "b/avg": 2.0, "b/min": 1.0, "b/max": 3.0},
        {"step": 2, "a": 1.0},
    ]
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        sink.write(1, {})


def test_histograms_are_a_line_a_step_and_a_resumed_run_cuts_later_ones(tmp_path):
    run = RunDirectory(tmp_path)
    sink = sink_of(run)
    for step in (1, 2, 3):
        sink.histograms(step, {"rollout/reward": Histogram.of([0.0] * step + [1.0])})
    sink.close()
    sink = sink_of(run, first_step=2)
    sink.histograms(3, {"rollout/reward": Histogram.of([0.0])})
    found = lines(tmp_path / "histograms.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert found[1]["rollout/reward"] == {"edges": [0.0, 1.0, 2.0], "counts": [2, 1]}
    assert found[2]["rollout/reward"]["counts"] == [1]


def test_nan_and_infinity_are_null(tmp_path):
    sink = sink_of(RunDirectory(tmp_path))
    sink.write(1, {"nan": Mean(math.nan, 1), "inf": Mean(math.inf, 1), "fine": Mean(np.float32(1.5), 1)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "nan": None, "inf": None, "fine": 1.5}]


@given(
    first=st.lists(st.integers(0, 12), max_size=12).map(sorted),
    resumed=st.integers(0, 12),
    more=st.lists(st.integers(0, 12), max_size=6).map(sorted),
    torn=st.integers(0, 30),
)
def test_resume_position_cuts_later_lines_and_steps_stay_strictly_increasing(tmp_path_factory, first, resumed, more, torn):
    """A kill anywhere in the last line leaves the file of a run that stopped at `resumed`."""
    path = tmp_path_factory.mktemp("run")
    run = RunDirectory(path)
    sink = sink_of(run)
    for step in first:
        sink.write(step, {f"at{step}": Mean(float(step), 1)})
    sink.close()
    run.close()
    whole = (path / "metrics.jsonl").read_bytes()
    surviving = whole[: len(whole) - torn]
    (path / "metrics.jsonl").write_bytes(surviving)
    complete = {json.loads(line)["step"] for line in surviving.split(b"\n")[:-1]}

    run = RunDirectory(path)
    sink = sink_of(run, first_step=resumed)
    following = [step for step in more if step >= resumed]
    for step in following:
        sink.write(step, {f"again{step}": Mean(1.0, 1)})
    sink.close()
    run.close()

    kept = {step for step in complete if step <= resumed}
    written = lines(path / "metrics.jsonl")
    assert [entry["step"] for entry in written] == sorted(kept | set(following))
    for entry in written:
        assert (f"at{entry['step']}" in entry) == (entry["step"] in kept)
        assert (f"again{entry['step']}" in entry) == (entry["step"] in following)


def test_samples_hold_text_counts_and_runs_of_versions_and_advantages(tmp_path):
    sink = sink_of(RunDirectory(tmp_path), samples_per_step=2)
    for uid in ("0/1", "0/2", "0/3"):
        sink.sample(7, uid, trajectory(), ADVANTAGE)
    sink.sample(8, "0/4", trajectory(), ADVANTAGE)
    written = lines(tmp_path / "samples.jsonl")
    assert [(entry["step"], entry["uid"]) for entry in written] == [(7, "0/1"), (7, "0/2"), (8, "0/4")]
    assert written[0] == {
        "step": 7,
        "uid": "0/1",
        "prompt": "1+2=",
        "completion": "3?!3",
        "tokens": 8,
        "trained_tokens": 3,
        "reward": 1.0,
        "components": {"exact": 1.0, "format": None},
        "versions": [[5, 1], [6, 1], [PROMPT_VERSION, 1], [6, 1]],
        "advantages": [[0.5, 2], [None, 1], [-0.333333, 1]],
        "pieces": ["3", "?", "!", "3"],
        "finish": "stop",
    }


def test_samples_of_later_steps_are_cut_on_resume(tmp_path):
    run = RunDirectory(tmp_path)
    sink = sink_of(run)
    for step in (1, 1, 2, 3):
        sink.sample(step, "0/1", trajectory(), ADVANTAGE)
    sink.close()
    sink_of(run, first_step=2)
    assert [entry["step"] for entry in lines(tmp_path / "samples.jsonl")] == [1, 1, 2]


def test_cut_of_a_file_that_is_not_there(tmp_path):
    assert cut(tmp_path / "metrics.jsonl", 5) == (0, None, {})


def test_status_is_whole_at_any_time_and_fail_keeps_the_step(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.read_status() == Status(RunState.RUNNING, step=0, version=0)
    sink_of(run).status(Status(RunState.RUNNING, step=3, version=2, total_steps=10))
    run.fail("train_dataset.path: no such file")
    expected = Status(RunState.FAILED, step=3, version=2, total_steps=10, error="train_dataset.path: no such file")
    assert run.read_status() == expected
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
    assert not list(tmp_path.glob(".status*"))


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.STOPPED, RunState.FINISHED])
def test_a_command_that_is_refused_has_failed_whatever_was_there(tmp_path, state):
    """status.json says how the last command ended, as its exit status does: at `begin`, and before it."""
    before = Status(state, step=10, version=10, total_steps=10)
    failed = functools.partial(dataclasses.replace, before, state=RunState.FAILED)
    run = RunDirectory(tmp_path)
    run.write_status(before)
    run.fail("seed: this run began with 1")
    assert run.read_status() == failed(error="seed: this run began with 1")
    run.begin(config_io.resolve(config_io.from_dict(base.get_config())))
    run.fail("checkpoints: none of those loads")
    assert run.read_status() == failed(error="checkpoints: none of those loads")
    run.write_status(before)
    with pytest.raises(UserError, match="in use by process"):
        RunDirectory(tmp_path)  # which leaves the status of the run that has it
    assert run.read_status() == before
    run.close()
    (tmp_path / "flight").write_text("")
    with pytest.raises(UserError, match="is no directory") as refused:
        RunDirectory(tmp_path)
    (tmp_path / "flight").unlink()
    assert RunDirectory(tmp_path).read_status() == failed(error=str(refused.value))


def test_a_directory_that_has_no_run_gets_no_status_by_a_refusal(tmp_path):
    for name in ("best", "status.json"):
        (tmp_path / name).mkdir() if name == "status.json" else (tmp_path / name).write_text("")
        with pytest.raises(UserError, match="move it away"):
            RunDirectory(tmp_path)
        assert not (tmp_path / "status.json").is_file()


def test_a_run_that_is_killed_before_its_first_step_is_known_to_have_been(tmp_path):
    """Its status names its process from the first; that of a run which went on is left to its end."""
    config = config_io.resolve(config_io.from_dict(base.get_config()))
    begun = RunDirectory(tmp_path / "new")
    begun.begin(config)
    fields = json.loads(begun.status.read_text())
    begun.status.write_text(json.dumps(fields | {"started": fields["started"] + 1}))  # of a process that is gone
    assert "its process" in History.load(begun.path).lost
    before = RunDirectory(tmp_path / "old")
    before.write_status(Status(RunState.FINISHED, step=10, version=10))
    before.begin(config)
    assert before.read_status().state is RunState.FINISHED


def test_a_run_without_actions_of_guardrails_has_no_file_of_them(tmp_path):
    event = Event(step=3, guard="max_grad_norm", metric="m", value=9.0, bound=1.0, action="warn", detail="")
    path = tmp_path / "guard.jsonl"
    sink = sink_of(RunDirectory(tmp_path))
    sink.close()
    assert not path.exists()
    sink.event(event)
    sink.event(dataclasses.replace(event, step=4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 4]
    cut(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3]


def test_two_runs_in_one_directory_are_refused(tmp_path):
    run = RunDirectory(tmp_path)
    script = (
        f"from rljax.sinks.run_directory import RunDirectory; from pathlib import Path; RunDirectory(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"{tmp_path} is in use by process {os.getpid()}" in other.stderr
    run.close()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_directory_of_something_else_is_told_before_it_is_written_to(tmp_path, caplog):
    config = config_io.from_dict(base.get_config())

    def told(*names):
        caplog.clear()
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        for name in names:
            (path / name).write_text("")
        run = RunDirectory(path)
        run.begin(config)
        run.close()
        return caplog.text

    assert told() == told("slurm-1.out", "my_config.py", "log.txt") == ""
    assert "holds no run, but a.jsonl, b.jsonl, c.jsonl and 1 more" in told("c.jsonl", "b.jsonl", "d.jsonl", "a.jsonl")
    assert told("metrics.jsonl", "notes.md") == ""  # a run is there, and the notes are about it


def test_recover_mode_fresh_refuses_what_auto_goes_on_with(tmp_path):
    tree = base.get_config().to_dict()
    auto = config_io.from_dict(tree)
    config_io.apply_override(tree, "recover.mode", "fresh")
    fresh = config_io.from_dict(tree)
    run = RunDirectory(tmp_path)
    run.begin(fresh)  # nothing there yet
    sink_of(run).write(1, {})
    with pytest.raises(UserError, match="holds a run"):
        run.begin(fresh)
    run.begin(auto)
    sink_of(run, first_step=1).write(2, {})
    assert config_io.from_json((tmp_path / "config.json").read_text()) == auto


def test_groups_and_samples_of_evaluations_are_lines_that_a_resumed_run_cuts(tmp_path):
    run = RunDirectory(tmp_path)
    sink = sink_of(run)
    for step in (1, 2):
        sink.group(step, Group("0/7", (trajectory(), trajectory())), [ADVANTAGE, -ADVANTAGE])
        sink.evaluated(step, "math", "9", trajectory())
    sink.close()
    sink_of(run, first_step=1).close()
    (group,), (evaluated,) = lines(tmp_path / "groups.jsonl"), lines(tmp_path / "eval_samples.jsonl")
    assert (group["step"], group["uid"], group["prompt"]) == (1, "0/7", "1+2=")
    assert [each["advantages"][0] for each in group["trajectories"]] == [[0.5, 2], [-0.5, 2]]
    assert all(each["completion"] == "3?!3" and each["reward"] == 1 for each in group["trajectories"])
    assert (evaluated["step"], evaluated["set"], evaluated["uid"], evaluated["completion"]) == (1, "math", "9", "3?!3")


def test_configs_are_those_that_steps_were_made_with(tmp_path):
    def config_with(rate):
        tree = base.get_config().to_dict()
        config_io.apply_override(tree, "actor.optimizer.lr", str(rate))
        return config_io.from_dict(tree)

    def kept():
        found = {int(path.stem): path for path in (tmp_path / "configs").glob("*.json")} | {0: tmp_path / "config.json"}
        return {step: config_io.from_json(path.read_text()).actor.optimizer.lr for step, path in found.items()}

    def session(rate, first_step, steps):
        run = RunDirectory(tmp_path)
        run.begin(config_with(rate))
        sink = sink_of(run, first_step=first_step)
        for step in steps:
            sink.write(step, {})
        sink.close()
        run.close()

    session(1e-3, 0, [1, 2, 3])
    assert kept() == {1: 1e-3, 0: 1e-3}
    for rate, steps in ((2e-3, []), (3e-3, [3])):  # a start that fails, and one that only evaluates, make no step
        session(rate, 3, steps)
        assert kept() == {1: 1e-3, 0: 1e-3}
    session(1e-3, 3, [4])
    session(4e-3, 4, [5, 6])
    session(4e-3, 6, [7])
    assert kept() == {1: 1e-3, 5: 4e-3, 0: 4e-3}
    session(5e-3, 2, [3])  # killed, and on from an older checkpoint
    assert kept() == {1: 1e-3, 3: 5e-3, 0: 5e-3}


@pytest.mark.parametrize("torn", [b'{"ste', b'{"step": 44, "x": 44}'])  # as the other lines, but for its newline
@pytest.mark.parametrize("damage", [b"{", b"\0" * 40, b'{"step": null}'])
def test_a_damaged_line_is_kept_and_told_and_a_torn_last_one_goes(tmp_path, damage, torn, caplog):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "x": step}).encode() for step in range(1, 45)]
    path.write_bytes(b"\n".join([*whole[:4], damage, *whole[5:], torn]))
    sink = sink_of(RunDirectory(tmp_path), first_step=44)
    sink.write(44, {"y": Mean(2.0, 1)})
    sink.write(45, {"x": Mean(1.0, 1)})
    found = path.read_bytes().splitlines()
    assert found[4] == damage and [json.loads(line)["step"] for line in found[:4] + found[5:]] == [1, 2, 3, 4, *range(6, 46)]
    assert json.loads(found[43]) == {"step": 44, "x": 44, "y": 2.0}
    assert f"metrics.jsonl: the line at byte {sum(map(len, whole[:4])) + 4} can't be read; left as it is" in caplog.text


def test_a_workdir_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--workdir: cannot write to .*file"):
        RunDirectory(tmp_path / "file")


def test_sinks_fan_out_to_every_sink(tmp_path):
    runs = [RunDirectory(tmp_path / name) for name in "ab"]
    sinks = Sinks([sink_of(run) for run in runs])
    sinks.write(1, {"x": Mean(1.0, 1)})
    sinks.sample(1, "0/0", trajectory(), ADVANTAGE)
    sinks.status(Status(RunState.FINISHED, step=1, version=1))
    sinks.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text() != ""
