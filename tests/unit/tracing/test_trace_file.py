"""The trace on disk: opens after a kill, stays within its size, ends nothing but itself."""

import json
import math
import os
import signal
import subprocess
import sys
import time

from rljax import tracing
from rljax.tracing import Event, Process, TraceFile
from tests.unit.tracing.trace_processor import query

TRAINER = Process(11, "trainer")


def begin(at, name="trajectory", track=1, **args):
    return Event("B", track, at, 0, name, args)


def end(at, track=1, **args):
    return Event("E", track, at, 0, "", args)


def read(path):
    return json.loads(path.read_text())


def test_the_trace_of_a_killed_process_opens_with_what_it_was_doing(tmp_path):
    path = tmp_path / "trace.json"
    script = f"""
import time
from pathlib import Path
from rljax import tracing
with tracing.to_file(Path({str(path)!r}), 1 << 20):
    with tracing.span("trajectory", lane="trajectory", uid="0/0"), tracing.span("generate"):
        pass
    with tracing.span("trajectory", lane="trajectory", uid="0/1"), tracing.span("tool", tool="python"):
        time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or "alive" not in path.read_text():  # a second after all else
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    spans = "select name, ts, dur, extract_arg(arg_set_id, 'args.uid') as uid from slice order by id"
    whole = path.read_bytes()
    rows, (last,) = query(whole, spans, "select max(ts) as ts from counter")
    (torn,) = query(whole[: whole.index(b'"name":"tool"') + 9], spans)
    assert [row["name"] for row in rows] == ["trajectory", "generate", "trajectory", "tool"]
    assert [row["dur"] >= 0 for row in rows] == [True, True, False, False], "the last two have not ended"
    assert [row["uid"] for row in rows] == ["0/0", None, "0/1", None]
    assert last["ts"] - rows[-1]["ts"] >= 1e9, "the trace goes on where nothing happens"
    assert torn == rows[:-1], "a line that was cut is left out"


def test_both_files_stay_within_the_size_and_hold_the_newest_events_and_what_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.tracing.file.INTERVAL", 0.001)
    limit, path = 20_000, tmp_path / "trace.json"
    file = TraceFile(path, limit)
    file.add(TRAINER, Event("M", 1, 0, 0, "trajectory 0", {}))
    file.add(TRAINER, Event("M", 2, 0, 0, "loop", {}))
    file.add(TRAINER, begin(5, "stuck", uid="0/0"))
    for i in range(40):
        for j in range(25):
            file.add(TRAINER, begin(10 * i + j, "update", 2, step=25 * i + j))
            file.add(TRAINER, end(10 * i + j + 1, 2))
        while file.waiting:
            time.sleep(0.001)
    file.close()
    older, newer = path.with_suffix(".1.json"), path
    assert sorted(os.listdir(tmp_path)) == ["trace.1.json", "trace.json"]
    assert older.stat().st_size + newer.stat().st_size < 1.5 * limit  # a write may go beyond the half once
    steps = [event["args"]["step"] for path in (older, newer) for event in read(path) if event.get("name") == "update"]
    assert steps == list(range(steps[0], 1000)), "none of the newest is missing"
    for path in (older, newer):
        events = read(path)
        assert {e["args"]["name"] for e in events if "name" in e.get("args", {})} == {"trainer", "trajectory 0", "loop"}
        assert [(e["tid"], e["args"]) for e in events if e.get("name") == "stuck"] == [(1, {"uid": "0/0"})]


def test_a_process_that_is_gone_leaves_no_open_span_and_equal_ids_are_told_apart(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(path, 1 << 20)
    here, there = Process(11, "worker a"), Process(11, "worker b")
    for process in (here, there):
        file.add(process, Event("M", 1, 0, 0, "trajectory 0", {}))
        file.add(process, begin(5))
    file.gone(here)
    file.add(there, end(9))
    file.add(there, end(10))  # of a beginning that never came
    file.close()
    events = read(path)
    assert len({event["pid"] for event in events}) == 2 == len({event["tid"] for event in events if event["ph"] == "B"})
    ends = {event["pid"]: event.get("args") for event in events if event["ph"] == "E"}
    assert ends == {11: {"error": "lost with its process"}, 12: None}


def test_a_run_that_goes_on_keeps_the_trace_before_it(tmp_path):
    path = tmp_path / "trace.json"
    for name in ("first", "second", "third"):
        with tracing.to_file(path, 1 << 20), tracing.span(name):
            pass
    assert [event["name"] for event in read(path) if event["ph"] == "X"] == ["third"]
    assert [event["name"] for event in read(path.with_suffix(".1.json")) if event["ph"] == "X"] == ["second"]


def test_any_argument_of_a_users_span_can_be_written_and_sent(tmp_path):
    circle = []
    circle.append(circle)
    path, args = (
        tmp_path / "trace.json",
        {"reward": math.nan, "pair": {(1, 2): 3}, "circle": circle, "text": "\ud83d", "x": None},
    )
    with tracing.to_file(path, 1 << 20), tracing.span("tool", **args):
        pass
    (found,) = (event["args"] for event in read(path) if event["ph"] == "X")
    expected = {"reward": "nan", "pair": "{(1, 2): 3}", "circle": "[[...]]", "text": "\ud83d", "x": None}
    (sent,) = tracing.from_text(tracing.to_text([Event("X", 1, 2, 3, "tool", args)]))
    assert found == expected == sent.args


def test_a_trace_that_cannot_be_written_ends_nothing_else(tmp_path, caplog):
    with tracing.to_file(tmp_path / "missing" / "trace.json", 1 << 20):
        for _ in range(3):
            with tracing.span("update"):
                pass
    assert "trace.json: No such file or directory; the trace ends here" in caplog.text
