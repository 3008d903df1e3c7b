"""A run directory becomes a history, whole, torn, old or live."""

import json

import numpy as np
import pytest

from rljax.config import io as config_io
from rljax.diagnosis import History, diagnose
from rljax.diagnosis.run_files import Tail
from rljax.diagnosis.summaries import render
from rljax.errors import UserError
from tests.unit.diagnosis import made

ROWS = [
    {"step": 1, "warmup/loss": 2.0},
    {"step": 2, "rollout/reward/avg": 0.5, "rollout/reward/min": 0.0, "rollout/reward/max": 1.0},
    {"step": 3, "rollout/reward/avg": 0.6, "ppo_actor/update/loss": None, "eval-rollout/reward/avg": 0.55},
]


def write(workdir, rows=ROWS, **files):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in files.items():
        (workdir / name.replace("__", ".")).write_text(text)
    return workdir


def test_a_value_is_found_at_its_step_and_nowhere_else(tmp_path):
    history = History.load(write(tmp_path))
    assert history.steps.tolist() == [1, 2, 3]
    for name, values in history.series.items():
        recorded = [row.get(name) for row in ROWS]
        assert np.array_equal(values, [np.nan if value is None else value for value in recorded], equal_nan=True)
    assert history["rollout/reward"].steps.tolist() == [2, 3] and history["rollout/reward"].values.tolist() == [0.5, 0.6]
    assert not history["no/such/metric"] and "rollout/reward" in history
    assert history.names("rollout/") == ["rollout/reward"]


def test_null_is_not_finite_and_no_value(tmp_path):
    history = History.load(write(tmp_path))
    assert history.not_finite["ppo_actor/update/loss"].tolist() == [3]
    assert not history["ppo_actor/update/loss"]


def test_rl_steps_are_those_since_the_first_reward(tmp_path):
    history = History.load(write(tmp_path))
    assert (history.first_step, history.last_step, history.rl_steps) == (2, 3, 2)
    assert history.rl.steps.tolist() == [2, 3] and not history.rl["warmup/loss"]
    assert history.evaluations.values.tolist() == [0.55]


def test_a_tail_has_every_whole_line_once_from_its_beginning_on(tmp_path):
    path = tmp_path / "samples.jsonl"
    early = Tail(path)
    assert early.read() == []  # there is no file yet
    path.write_text('{"step": 1}\n')
    late = Tail(path)
    for text in ('{"step": 2}\n{"st', 'ep": 3}\n', "", 'not json\n{"no": "step"}\n{"step": 4}\n'):
        with path.open("a") as file:
            file.write(text)
        late_lines = late.read()
        assert all(line["step"] > 1 for line in late_lines)
    assert [line["step"] for line in early.read()] == [1, 2, 3, 4] and early.read() == []


def test_a_torn_last_line_is_left_out(tmp_path):
    whole = History.load(write(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/rew')
    assert History.load(tmp_path).steps.tolist() == whole.steps.tolist()


def test_a_step_that_was_written_again_has_its_last_values(tmp_path):
    again = [*ROWS, {"step": 3, "rollout/reward/avg": 0.9}]
    assert History.load(write(tmp_path, again))["rollout/reward"].values.tolist() == [0.5, 0.9]


def test_other_files_are_read_where_they_are(tmp_path):
    config = made.config()
    write(
        tmp_path,
        config__json=config_io.to_json(config),
        context__json=json.dumps({"sessions": [made.SESSION]}),
        status__json=json.dumps({"state": "finished", "step": 3}),
        samples__jsonl=json.dumps({"step": 2, "completion": "7"}) + "\n",
        guard__jsonl=json.dumps({"step": 3, "guard": "max_approx_kl"}) + "\n",
        histograms__jsonl=json.dumps({"step": 2, "rollout/reward": {"edges": [0, 1, 2], "counts": [3, 5]}}) + "\n",
    )
    history = History.load(tmp_path)
    assert history.config == config and list(history.context) == [made.SESSION]
    assert history.status == {"state": "finished", "step": 3}
    assert history.samples[0]["completion"] == "7" and history.guard[0]["guard"] == "max_approx_kl"
    assert history.histograms["rollout/reward"][2].counts.sum() == 8


def test_a_config_of_another_version_keeps_what_is_known(tmp_path):
    tree = config_io.to_dict(made.config(actor__kl_ctl=0.25))
    del tree["guard"]["patience"]
    tree["actor"]["key_of_the_future"] = 1
    tree["an_engine_that_is_not_installed"] = {"slots": 3}
    history = History.load(write(tmp_path, config__json=json.dumps(tree)))
    assert history.config is not None and history.config.actor.kl_ctl == 0.25


@pytest.mark.parametrize("name", ["config.json", "context.json", "status.json", "samples.jsonl", "histograms.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", '"x"', "\x00\xff"])
def test_a_broken_file_counts_as_missing(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_text(content)
    history = History.load(tmp_path)
    assert (history.config, history.status, list(history.context), list(history.samples)) == (None, None, [], [])


@pytest.mark.parametrize("name", ["config.json", "context.json", "status.json"])
@pytest.mark.parametrize("content", ["", '{"actor": {', "[]"])
def test_a_broken_file_is_named_and_a_missing_one_is_not(tmp_path, name, content):
    assert not History.load(write(tmp_path)).damage
    (tmp_path / name).write_text(content)
    history = History.load(tmp_path)
    assert history.damage == [f"{name} is damaged: it counts as missing"]
    assert history.damage[0] in render.text(diagnose(history)).splitlines()


def test_lines_in_the_middle_that_can_not_be_read_are_counted(tmp_path):
    whole = History.load(write(tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], "\x00gar{bage", *lines[1:], '{"step": 4, "roll']))
    history = History.load(tmp_path)
    assert history.damage == ["metrics.jsonl is damaged: line 2 is left out"]
    assert history.steps.tolist() == whole.steps.tolist()
    (tmp_path / "metrics.jsonl").write_text("\n".join(["x"] * 5 + lines))
    assert History.load(tmp_path).damage == ["metrics.jsonl is damaged: 5 lines (1, 2, 3, ...) are left out"]


def test_only_a_newline_ends_a_line(tmp_path):
    (write(tmp_path) / "samples.jsonl").write_text('{"step": 1, "completion": "a\u2028b\x85c"}\n', encoding="utf-8")
    history = History.load(tmp_path)
    assert [sample["completion"] for sample in history.samples] == ["a\u2028b\x85c"] and not history.damage


@pytest.mark.parametrize(
    "line",
    ['{"step": 1e3}', '{"step": true}', '{"step": 1' + "0" * 30 + "}", "[" * 100_000],
    ids=["float", "bool", "huge", "deep"],
)
def test_a_line_with_no_step_to_count_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 1, "rollout/reward": 1{"0" * 400}, "rollout/groups": 2}}\n')
    history = History.load(tmp_path)
    assert history.damage == ["metrics.jsonl is damaged: line 1 is left out"]
    assert history.steps.tolist() == [1] and history.not_finite["rollout/reward"].tolist() == [1]


@pytest.mark.parametrize(
    "bins", [{"edges": ["a"], "counts": [1]}, {"edges": [0], "counts": []}, {"edges": [0, 1], "counts": [None]}]
)
def test_a_histogram_that_is_none_is_left_out(tmp_path, bins):
    (write(tmp_path) / "histograms.jsonl").write_text(json.dumps({"step": 1, "reward": bins}) + "\n")
    assert History.load(tmp_path).histograms == {}


def test_a_directory_without_a_run_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=str(path)):
            History.load(path)


def test_aligned_series_have_the_same_steps():
    history = History.of_rows([{"step": s, "a": s, **({"b": s} if s % 2 else {})} for s in range(1, 8)])
    a, b = history.aligned("a", "b")
    assert a.steps.tolist() == b.steps.tolist() == [1, 3, 5, 7]


def test_between_cuts_every_part():
    whole = made.history()
    part = whole.between(10, 20)
    assert part.steps.tolist() == list(range(10, 21)) and {s["step"] for s in part.samples} == set(range(10, 21))
    assert part["rollout/reward"].values.tolist() == whole["rollout/reward"].values[9:20].tolist()
