"""Logs of other trainers are read as the run that they record, whatever their format."""

import csv
import json
import re

import numpy as np
import pytest

from rljax.diagnosis import History, diagnose, importers, reference
from rljax.diagnosis.importers import formats, tables
from rljax.errors import UserError
from tests.unit.diagnosis import made

SOURCES = [name for name, source in tables.SOURCES.items() if source.table]


def log_of(source: str, columns) -> list[dict[str, float]]:
    """Writes our columns under a trainer's names, as far as it has one."""
    theirs = {}
    for renamed in tables.SOURCES[source].table:
        for ours, values in columns.items():
            plain = ours.removesuffix("/avg")
            pattern = renamed.pattern.replace(r"\d+", "1").replace("(.+)", "exact").replace(".+", "set")
            if renamed.name.replace("*", "exact") in (ours, plain):
                theirs.setdefault(pattern, values / renamed.factor)
    count = len(next(iter(columns.values())))
    return [{"step": at + 1} | {name: float(v[at]) for name, v in theirs.items() if np.isfinite(v[at])} for at in range(count)]


def as_jsonl(tmp_path, rows):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_csv(tmp_path, rows):
    names = sorted({name for row in rows for name in row} - {"step"})
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", *(f"my-run - {name}" for name in names), f"my-run - {names[0]}__MIN"])
        writer.writerows([[row["step"], *(row.get(name, "") for name in names), -1e9] for row in rows])
    return path


def as_events(tmp_path, rows):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "events"))
    for row in rows:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        writer.add_event(event_pb2.Event(step=row["step"], summary=summary_pb2.Summary(value=values)))
    writer.close()
    return tmp_path / "events"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_events])
def test_values_come_back_under_our_names(tmp_path, source, write):
    rows = log_of(source, made.healthy())
    history = importers.read(write(tmp_path, rows))
    reward = np.float32(made.healthy()["rollout/reward/avg"]) if write is as_events else made.healthy()["rollout/reward/avg"]
    assert np.allclose(history["rollout/reward"].values, reward, rtol=1e-6)
    assert history.evaluations.steps.tolist() == made.history().evaluations.steps.tolist()
    assert len(history.series) > 10
    for name, values in history.series.items():
        ours = made.healthy().get(name, made.healthy().get(f"{name}/avg"))
        assert ours is not None and np.allclose(values, ours, rtol=1e-5, equal_nan=True), name


@pytest.mark.parametrize("source", SOURCES)
def test_a_healthy_log_has_notes_at_most_and_says_what_it_can_not_judge(tmp_path, source):
    diagnosis = diagnose(importers.read(as_jsonl(tmp_path, log_of(source, made.healthy())), source=source))
    assert diagnosis.first is None, diagnosis.verdict()
    assert "freshness.lag_bound" in diagnosis.unjudged and "policy.clip_ratio" not in diagnosis.unjudged


@pytest.mark.parametrize("source", SOURCES)
def test_a_fault_is_found_in_a_log(tmp_path, source):
    late = np.arange(made.STEPS) >= 30
    columns = made.healthy() | {"ppo_actor/update/clip_ratio": np.where(late, 0.7, 0.02)}
    first = diagnose(importers.read(as_jsonl(tmp_path, log_of(source, columns)), source=source)).first_break
    assert first is not None and (first.rule, first.step) == ("policy.clip_ratio", 31)


LOUD = made.healthy() | {  # many rules speak, and the others say what they lack
    "ppo_actor/update/clip_ratio": np.where(np.arange(made.STEPS) >= 30, 0.7, 0.02),
    "ppo_actor/no_eos_ratio": np.full(made.STEPS, 0.4),
    "rollout/equal_reward_groups": np.full(made.STEPS, 0.97),
    "ppo_actor/seq_len/avg": np.linspace(3, 9, made.STEPS),
    "ppo_actor/update/entropy": np.geomspace(0.3, 0.001, made.STEPS),
    "ppo_actor/update/grad_norm": np.geomspace(1, 1e4, made.STEPS),
    "perf/host_memory_bytes": np.linspace(2**30, 2**33, made.STEPS),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_diagnosis_is_in_the_words_of_the_log(tmp_path, source):
    """No name of ours stands where the trainer has one; figures are those of the name beside them."""
    rows = log_of(source, LOUD)
    diagnosis = diagnose(importers.read(as_jsonl(tmp_path, rows), source=source))
    ours = {renamed.name.removesuffix("/avg") for renamed in tables.SOURCES[source].table if renamed.factor == 1}
    lines = [line for f in diagnosis.findings for line in (*f.evidence, *f.series, f.next, *f.causes)]
    said = {name for line in (*lines, *diagnosis.unjudged.values()) for name in re.findall(r"[\w-]+(?:/[\w@*-]+)+", line)}
    assert len(diagnosis.findings) > 5 and said & rows[0].keys()
    assert not {name for name in said if name.removesuffix("/avg") in ours} - rows[0].keys()


def test_a_metric_in_other_units_keeps_our_name_beside_the_trainers(tmp_path):
    diagnosis = diagnose(importers.read(as_jsonl(tmp_path, log_of("verl", LOUD)), source="verl"))
    (leak,) = [f for f in diagnosis.findings if f.rule == "resources.memory_growth"]
    assert "perf/host_memory_bytes (perf/cpu_memory_used_gb times 1.07374e+09)" in leak.evidence[0]


def test_prefixes_of_the_hf_trainer_are_undone(tmp_path):
    rows = [
        {
            "train/global_step": step,
            "train/reward": 0.5,
            "train/clip_ratio/region_mean": 0.1,
            "eval/reward": 0.4,
            "_step": 7 * step,
        }
        for step in range(1, 9)
    ]
    history = importers.read(as_jsonl(tmp_path, rows))
    assert history.steps.tolist() == list(range(1, 9))
    assert history["rollout/reward"].values[0] == 0.5 and history.evaluations.values[0] == 0.4
    assert history["ppo_actor/update/clip_ratio"].values[0] == 0.1


def test_a_trainer_state_is_read(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.5}, {"step": 1, "eval_reward": 0.25}], "epoch": 1}))
    history = importers.read(path)
    assert history["rollout/reward"].values.tolist() == [0.5] and history.evaluations.values.tolist() == [0.25]


@pytest.mark.parametrize("key", ["training/global_step", "actor/entropy"])
def test_metrics_under_data_are_read_as_those_beside_the_step(tmp_path, key):
    flat = [row | {key: float(row["step"])} for row in log_of("verl", made.healthy())]
    nested = [{"step": row["step"], "data": {name: row[name] for name in row if name != "step"}} for row in flat]
    ours, theirs = (importers.read(as_jsonl(tmp_path, rows)) for rows in (nested, flat))
    assert ours.steps.tolist() == theirs.steps.tolist() and ours.series.keys() == theirs.series.keys()
    assert all(np.array_equal(ours.series[name], theirs.series[name], equal_nan=True) for name in ours.series)


def test_held_out_reward_of_verl_is_found_where_its_core_is_another_figure(tmp_path):
    data = {"critic/score/mean": 0.5, "val-core/aime/acc/mean@32": 0.1, "val-aux/aime/reward/mean@32": 0.2}
    history = importers.read(as_jsonl(tmp_path, [{"step": 1, "data": data}]))
    assert history.evaluations.values.tolist() == [0.2]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    path = tmp_path / "panel.csv"
    path.write_text("Step,run - reward\n1,0.5\n", encoding="utf-8-sig")
    assert importers.read(path, source="trl")["rollout/reward"].values.tolist() == [0.5]


def test_a_directory_of_event_files_is_one_run(tmp_path):
    """Several files of a directory are sessions of one run; several directories are several runs."""
    rows = log_of("trl", made.healthy())
    (tmp_path / "one").mkdir()
    first, second = rows[:40], rows[40:]
    (event_file,) = as_events(tmp_path / "one", first).iterdir()
    assert importers.read(tmp_path).source == importers.read(event_file).source == str(event_file)
    as_events(tmp_path / "one", second)
    whole = importers.read(tmp_path)
    assert whole.steps.tolist() == [row["step"] for row in rows] and "1 more event files" in whole.source
    (tmp_path / "two").mkdir()
    events = as_events(tmp_path / "two", [row | {"reward": 9.0} for row in rows])
    with pytest.raises(UserError, match=r"event files of 2 runs \(one/events, two/events\); name one"):
        importers.read(tmp_path)
    assert set(importers.read(tmp_path / "two")["rollout/reward"].values) == {9.0}
    event_file.rename(tmp_path / event_file.name)  # its own come before those below it
    assert importers.read(tmp_path).steps.tolist() == [row["step"] for row in first]
    assert importers.read(events).steps.tolist() == whole.steps.tolist()


def test_event_files_may_be_half_written_but_not_damaged(tmp_path):
    path = as_events(tmp_path, [{"step": step, "reward": 0.5, "kl": 0.1} for step in range(1, 30)])
    (file,) = path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert importers.read(path).steps.tolist() == list(range(1, 29))
    file.write_bytes(whole[:-5] + bytes(100))
    assert importers.read(path).steps.tolist() == list(range(1, 29))
    at = len(whole) // 2
    file.write_bytes(whole[:at] + b"reward" + whole[at + 6 :])
    with pytest.raises(UserError, match=r"--log: .* is damaged at byte \d+"):
        importers.read(path)


def test_own_metrics_need_no_table(tmp_path):
    rows = [{"step": 1, "rollout/reward/avg": 0.5, "ppo_actor/update/loss": None}]
    history = importers.read(as_jsonl(tmp_path, rows))
    assert isinstance(history, History) and history.not_finite["ppo_actor/update/loss"].tolist() == [1]


def test_a_list_of_objects_is_read_as_lines_of_them(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "data": {"reward": 0.75}}]
    (tmp_path / "log.json").write_text(json.dumps(rows))
    assert importers.read(tmp_path / "log.json")["rollout/reward"].values.tolist() == [0.5, 0.75]


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = as_jsonl(tmp_path, [{"step": 1, "reward": 0.5, "kl": 0.1}])
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert importers.read(path).steps.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("log.jsonl", "not json\n{}\n", "log.jsonl:1: not JSON"),
        ("log.jsonl", '{"reward": 1}\n', "no column of steps"),
        ("log.jsonl", '{"step": 1, "cats": 1}\n', "no metric that rules know"),
        ("log.jsonl", '{"step": 1, "grad_norm": 1, "loss": 1}\n', "no reward"),
        ("log.jsonl", "", "no line of metrics"),
        ("log.jsonl", "null\n3\n", "no line of metrics"),
        ("log.jsonl", '{"step": "one", "reward": 1}\n', "column 'step' has no number"),
        ("log.jsonl", f'{{"step": {10**30}, "reward": 1}}\n', "column 'step' has no number"),
        ("export.csv", "", "is empty"),
        ("export.csv", "step,reward\n", "no line of metrics"),
        ("export.csv", "step,reward\none,1\n", "column 'step' has no number"),
        ("export.csv", "step;reward\n1;2\n", "no column of steps.*'step;reward'"),
        ("export.csv", f"step,text\n1,{'x' * 200_000}\n", "export.csv:2: not a table of numbers"),
        ("export.csv", "Step,a - reward,b - reward\n1,2,3\n", "2 runs"),
    ],
)
def test_a_log_that_can_not_be_read_is_an_error_that_names_it(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        importers.read(tmp_path / name)


def test_the_page_names_every_column_of_steps_in_order():
    assert ", ".join(f"`{name}`" for name in formats.STEP_NAMES) in " ".join(reference.page().split())


def test_unknown_formats_and_sources_are_errors(tmp_path):
    path = as_jsonl(tmp_path, [{"step": 1, "reward": 1.0}])
    with pytest.raises(UserError, match=r"--log: no such file"):
        importers.read(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"--format.*jsonl"):
        importers.read(path, "jsonlines")
    with pytest.raises(UserError, match=r"--source.*trl"):
        importers.read(path, source="tlr")
    for form in ("wandb-csv", "jsonl"):
        with pytest.raises(UserError, match=f"is a directory, and --format={form} reads a file"):
            importers.read(tmp_path, form)
    with pytest.raises(UserError, match="no event files"):
        importers.read(tmp_path, "tensorboard")
