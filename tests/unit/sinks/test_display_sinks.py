"""TensorBoard, W&B, plain lines and the live view show the numbers that metrics.jsonl holds."""

import dataclasses
import datetime
import io
import json
import logging
import math
import os
import sys
import types

import pytest
import rich

from rljax.config import io as config_io
from rljax.config.schema import StatsLoggerConfig
from rljax.configs import base
from rljax.errors import UserError
from rljax.experiments.screen import Stderr
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean
from rljax.sinks import RunState, Status, live
from rljax.sinks.build import PACKAGES, build, require_packages
from rljax.sinks.live import LineSink, LiveSink, sparkline
from rljax.sinks.run_directory import RunDirectory
from rljax.sinks.tensorboard import TensorBoardSink


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    """Reads event files with TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_written_and_resume_purges(tmp_path):
    sink = TensorBoardSink(tmp_path, first_step=0)
    for step in (1, 2, 3):
        sink.write(step, {"rollout/reward": Mean.of([0.0, float(step)])})
    sink.close()
    sink = TensorBoardSink(tmp_path, first_step=2)
    sink.write(3, {"rollout/reward": Mean.of([0.0, 5.0])})
    sink.write(3, {"rollout/reward": Mean.of([1.0])})  # the step's mean, as metrics.jsonl has it
    sink.close()
    assert scalars(tmp_path)["rollout/reward/avg"] == [(1, 0.5), (2, 1.0), (3, 2.5), (3, 2.0)]


def test_tensorboard_reads_back_the_bins_of_a_histogram(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    histogram = Histogram.of([0.0, 0.0, 1.0, 3.0])
    sink = TensorBoardSink(tmp_path, first_step=0)
    sink.histograms(1, {"rollout/reward": histogram})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Histograms("rollout/reward/histogram")
    assert event.histogram_value.bucket_limit == histogram.edges[1:].tolist()
    assert event.histogram_value.bucket == histogram.counts.tolist() and event.histogram_value.num == 4


def test_plain_lines_that_nobody_reads_any_more_end_no_run():
    read, write = os.pipe()
    with open(write, "w") as stream:
        sink = LineSink(stream)
        sink.status(Status(RunState.FINISHED, step=1, version=1))
        assert b"step 1" in os.read(read, 100)
        os.close(read)
        for step in (2, 3):
            sink.status(Status(RunState.FINISHED, step=step, version=step))


def test_plain_lines_merge_a_step_and_name_the_end():
    stream = io.StringIO()
    sink = LineSink(stream)
    sink.write(4, {"rollout/reward": Mean(1.0, 1)})
    sink.write(4, {"rollout/reward": Mean(0.0, 3), "other": Mean(1.0, 1)})
    sink.status(Status(RunState.RUNNING, step=4, version=4, total_steps=9))
    sink.status(Status(RunState.RUNNING, step=4, version=4, total_steps=9))  # nothing new: no line
    sink.write(4, {"eval-rollout/reward": Mean(0.5, 1)})  # an evaluation comes after its step's line
    sink.status(Status(RunState.FINISHED, step=9, version=9, total_steps=9))
    assert [line[10:] for line in stream.getvalue().splitlines()] == [
        "step 4/9  reward 0.25",
        "step 4/9  eval reward 0.5",
        "step 9/9  finished",
    ]


def test_a_line_every_few_seconds_has_means_rates_clock_and_what_is_left(monkeypatch):
    """After a start of 60 s, 300 steps of 0.1 s are six lines, whose means are those of the steps since the last."""
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    sink = LineSink(stream, every=5.0)
    sink.status(Status(RunState.RUNNING, step=0, version=0, total_steps=1000))
    sink.write(0, {"eval-rollout/reward": Mean(0.5, 1)})
    clock[0] += 60
    for step in range(1, 301):
        clock[0] += 0.1
        tokens = {"timeperf/trained_tokens_per_s": Mean(50, 0.1), "timeperf/wall": Mean(0.1, 1)}
        sink.write(step, {"sft/loss": Mean(float(step), 1)} | tokens)
        sink.status(Status(RunState.RUNNING, step=step, version=0, total_steps=1000))
    start, *lines = stream.getvalue().splitlines()
    assert start[10:] == "step 0/1000  eval reward 0.5" and len(lines) == 6 and all(line[2] == line[5] == ":" for line in lines)
    assert lines[0][10:] == "step 1/1000  supervised loss 1  500 tokens/s  0.1 s/step"
    first, second = (int(line.split("step ")[1].split("/")[0]) for line in lines[1:3])
    mean = (first + 1 + second) / 2
    assert lines[2][10:].startswith(f"step {second}/1000  supervised loss {mean:g}  500 tokens/s  0.1 s/step")
    assert lines[2].endswith(f"  0:01:{round((1000 - second) / 10) - 60:02} left")


@pytest.mark.parametrize("make", [lambda stream: LineSink(stream), lambda stream: LiveSink()])
def test_the_time_left_is_that_of_the_steps_that_are_left(monkeypatch, capsys, make):
    """900 warm-up steps of 0.1 s, then steps of 1 s, and from the hundredth on of 3 s: none of an earlier kind counts."""
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    sink, left = make(stream), {}
    sink.status(Status(RunState.RUNNING, step=0, version=0, total_steps=1200))
    for step in range(1, 1101):
        version = max(0, step - 900)
        clock[0] += 0.1 if not version else 1.0 if version < 100 else 3.0
        sink.write(step, {"rollout/reward": Mean(1.0, 1)} if version else {"warmup/loss": Mean(1.0, 1)})
        sink.status(Status(RunState.RUNNING, step=step, version=version, total_steps=1200))
        sink.write(step, {"eval-rollout/reward": Mean(1.0, 1)})  # no step: it changes nothing
        if isinstance(sink, LineSink):
            said = stream.getvalue().splitlines()[-2]
        else:
            said = sink._progress.tasks[0].fields["left"]
        left[step] = said.split("  ")[-1].removesuffix(" left") if "left" in said else None
    sink.close()
    assert not any(left[step] for step in range(1, 902))
    for version in (2, 50, 99):
        assert left[900 + version] == str(datetime.timedelta(seconds=300 - version))
    assert left[1100] == str(datetime.timedelta(seconds=3 * 100))


def test_a_run_that_has_more_steps_than_it_is_asked_for_is_not_at_a_share_of_them():
    stream = io.StringIO()
    for total in (4, 1, None):
        LineSink(stream).status(Status(RunState.FINISHED, step=4, version=4, total_steps=total))
    assert [line[10:] for line in stream.getvalue().splitlines()] == [
        "step 4/4  finished",
        "step 4 (1 asked for)  finished",
        "step 4  finished",
    ]


VERDICTS = ("", "policy broke first", "policy broke first", "no link is broken")


def test_the_verdict_is_a_line_when_it_changes_in_the_log_and_on_the_screen(capsys):
    stream, screen = io.StringIO(), LiveSink()
    sink = LineSink(stream)
    for step, verdict in enumerate(VERDICTS, 1):
        for each in (sink, screen):
            each.status(Status(RunState.RUNNING, step=step, version=step, verdict=verdict))
    screen.close()
    assert stream.getvalue().splitlines() == ["verdict: policy broke first", "verdict: no link is broken"]
    assert "verdict: no link is broken" in capsys.readouterr().out


def test_tensorboard_has_the_verdict_as_text_when_it_changes(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path, first_step=0)
    for step, verdict in enumerate(VERDICTS, 1):
        sink.status(Status(RunState.RUNNING, step=step, version=step, verdict=verdict))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("verdict")]
    assert found == [(2, "policy broke first"), (4, "no link is broken")]
    assert events.SummaryMetadata("verdict").plugin_data.plugin_name == "text"


class Terminal(io.StringIO):
    """The output of a terminal: stdout and stderr in one."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("name", "live"), [("xterm-256color", True), ("dumb", False), ("unknown", False), ("", True)])
def test_a_terminal_that_draws_over_nothing_gets_lines_as_a_pipe_does(tmp_path, monkeypatch, name, live):
    monkeypatch.setenv("TERM", name)
    said = {}
    for kind in (Terminal, io.StringIO):
        monkeypatch.setattr(sys, "stdout", kind())
        monkeypatch.setattr(rich, "_console", None)
        run = RunDirectory(tmp_path / kind.__name__)
        sinks = build(config_io.from_dict(base.get_config()), run, None, first_step=0)
        for step in range(1, 3):
            sinks.status(Status(RunState.RUNNING, step=step, version=step))
            sinks.write(step, {"rollout/reward": Mean.of([1.0])})
        sinks.close()
        run.close()
        said[kind] = [line.split("  ")[1:3] for line in sys.stdout.getvalue().splitlines()]
    assert said[io.StringIO] == [["step 1", "reward 1"]]
    assert (said[Terminal] == said[io.StringIO]) is not live


def test_warnings_stand_whole_above_the_live_view_in_a_terminal(monkeypatch):
    pyte = pytest.importorskip("pyte")
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rich, "_console", None)
    log, handler = logging.getLogger("rljax.test"), logging.StreamHandler(Stderr())
    log.addHandler(handler)
    monkeypatch.setattr(log, "propagate", False)
    warnings = [f"warning {n}: " + " ".join(f"word{n}.{k}" for k in range(20)) for n in range(3)]
    sink = LiveSink()
    for step in range(1, 31):
        sink.write(step, {"rollout/reward": Mean(step / 30, 1)})
        sink.status(Status(RunState.RUNNING, step=step, version=step, total_steps=30))
        if step % 10 == 0:
            sink._live.refresh()  # as its thread does four times a second
            log.warning(warnings[step // 10 - 1])
            sink._live.refresh()
    sink.close()
    log.removeHandler(handler)
    screen = pyte.HistoryScreen(80, 24, history=1000)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    rows = ["".join(row[x].data for x in range(80)) for row in screen.history.top] + list(screen.display)
    shown = " ".join("".join(rows).split())
    assert [shown.count(" ".join(line.split())) for line in warnings] == [1, 1, 1]
    assert sum(row.startswith("reward ") for row in rows) == sum("30/30" in row for row in rows) == 1


def test_live_view_shows_the_latest_values(capsys):
    sink = LiveSink()
    sink.write(1, {"rollout/reward": Mean(0.25, 1), "unknown": Mean(7.0, 1), "rollout/staleness": Mean(0.0, 0)})
    sink.write(2, {"rollout/reward": Mean(0.75, 1)})
    sink.status(Status(RunState.RUNNING, step=2, version=1, total_steps=4))
    sink.close()
    shown = capsys.readouterr().out
    assert "reward" in shown and "0.75" in shown and "▁█" in shown and "2/4" in shown and "running, version 1" in shown
    assert "unknown" not in shown and "lag" not in shown


def test_sparkline_spans_the_finite_values():
    assert sparkline([float(n) for n in range(8)]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == "▁ █ "
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def history_of(directory) -> dict[int, dict[str, float]]:
    """Reads what an offline W&B run logged, from its own log: the values by step.

    The log is LevelDB's: blocks of 32 KiB, in which each part of a record has a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("*.wandb")
    data, at, found, whole = path.read_bytes(), 7, {}, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block's end holds no header
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (2, 3):  # first or middle part
            continue
        record, whole = Record.FromString(whole), b""
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[int(items["_step"])] = {name: value for name, value in items.items() if not name.startswith("_")}
    return found


def test_wandb_shows_what_metrics_jsonl_shows_after_a_stop_and_after_a_kill(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="W&B's client is not installed")
    tree = base.get_config().to_dict()
    for key, value in (("stats_logger.wandb", "True"), ("stats_logger.live", "False")):
        config_io.apply_override(tree, key, value)
    config = config_io.from_dict(tree)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)

    def session(first_step, last_step, value):
        run = RunDirectory(tmp_path)
        sinks = build(config, run, None, first_step=first_step)
        for step in range(first_step + 1, last_step + 1):
            sinks.write(step, {"rollout/reward": Mean.of([0.0, value])})
            sinks.write(step, {"rollout/reward": Mean.of([value + step])})
        sinks.close()
        run.close()
        return (tmp_path / "wandb_id").read_text()

    first = session(0, 3, 1.0)
    assert session(3, 7, 2.0) == first  # stopped, and on
    second = session(5, 9, 3.0)  # killed after 7, and on from 5
    assert second != first
    wandb.teardown()  # its service writes on after the end of a run
    shown = {}
    for directory in sorted(tmp_path.glob(f"wandb/offline-run-*-{second}")):
        shown |= history_of(directory)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert shown == {line.pop("step"): pytest.approx(line) for line in lines}


@pytest.mark.parametrize("missing", [("tensorboard",), ("wandb",), ("tensorboard", "wandb")])
def test_all_sinks_without_their_package_are_in_one_line(missing, monkeypatch):
    for name in ("tensorboard", "wandb"):
        there = None if name in missing else types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, there)  # None: the import fails
        monkeypatch.setitem(sys.modules, PACKAGES[name], there)
    logger = dataclasses.replace(StatsLoggerConfig(), tensorboard=True, wandb=True)
    with pytest.raises(UserError) as raised:
        require_packages(logger)
    assert str(raised.value).startswith(f"stats_logger.{missing[0]}: not installed")
    assert f"rljax[{','.join(missing)}]" in str(raised.value)
    assert all(name in str(raised.value) for name in missing)
    off = {name: False for name in missing}
    require_packages(dataclasses.replace(logger, **off))
