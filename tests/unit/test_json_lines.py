"""Files of lines in parts: whatever the sizes of the parts, readers see the lines of one file that was never parted."""

import io
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax import json_lines
from rljax.config.schema import Config, StatsLoggerConfig
from rljax.diagnosis import History
from rljax.diagnosis.run_files import Tail
from rljax.json_lines import LineFile, backwards, cut, ends, lines, newest_step, parts
from rljax.metrics.guardrails import Event
from rljax.metrics.mean import Mean
from rljax.run.verdicts import Verdicts
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink

SIZES = st.sampled_from([1, 60, 300, 1 << 30])  # bytes of a part
STEPS = st.lists(st.integers(1, 9), max_size=20).map(sorted)


def line_of(step, number, text="x"):
    return json.dumps({"step": step, "number": number, "text": text * (number % 7)})


def fill(path, steps, *, part_bytes, first_step=0, first=0, **options):
    file = LineFile(path, first_step, part_bytes=part_bytes, **options)
    for number, step in enumerate(steps, first):
        file.append(step, line_of(step, number))
    file.close()


def read(path):
    return [json.loads(line) for line in lines(path)]


@given(steps=STEPS, part_bytes=SIZES, resumed=st.integers(0, 10), again=STEPS, other=SIZES)
def test_a_file_in_parts_is_one_file_before_and_after_a_resume(tmp_path_factory, steps, part_bytes, resumed, again, other):
    whole, parted = (tmp_path_factory.mktemp("lines") / "samples.jsonl" for _ in range(2))
    for path, size in ((whole, 1 << 30), (parted, part_bytes)):
        fill(path, steps, part_bytes=size)
    assert read(parted) == read(whole) and len(parts(whole)) == 1
    assert newest_step(parted) == max(steps, default=None)
    for part in parts(parted)[:-1]:
        within = [json.loads(line)["step"] for line in part.read_text().splitlines()]
        assert int(part.name.split(".")[1]) == within[-1] and part.stat().st_size >= part_bytes
    later = [step for step in again if step > resumed]
    for path, size in ((whole, 1 << 30), (parted, other)):
        fill(path, later, part_bytes=size, first_step=resumed, first=100)
    assert read(parted) == read(whole)
    assert [entry["step"] for entry in read(whole)] == [step for step in steps if step <= resumed] + later


@given(sizes=st.lists(st.integers(0, 300), max_size=12), torn=st.booleans(), block=st.sampled_from([1, 7, 64, 1 << 16]))
def test_lines_from_the_end_are_the_lines_in_reverse(sizes, torn, block):
    content = b"".join(b"x" * size + b"\n" for size in sizes)[: -1 if torn else None]
    file, before = io.BytesIO(content), json_lines.BLOCK
    json_lines.BLOCK = block
    try:
        found = list(backwards(file))
    finally:
        json_lines.BLOCK = before
    expected = io.BytesIO(content).readlines()
    assert [line for _, line in reversed(found)] == expected
    assert all(content[position : position + len(line)] == line for position, line in found)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (b"", 0),
        (b'{"step": 4', 0),  # torn by a kill
        (b"\0\0\0\n", 0),  # one line, which a power cut left
        (b"x\ny\n", 1),
        (b"x\ny\nz", 2),
        (b'x\n{"step": 9}\n', 1),  # between lines of later steps, which go
    ],
)
def test_lines_that_are_cut_and_cannot_be_read_are_told(tmp_path, caplog, end, told):
    path = tmp_path / "samples.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + end)
    assert cut(path, 2).step == 2 and path.read_bytes() == whole
    assert len(caplog.records) == (told > 0)
    assert not told or f"lines from byte {len(whole)} on that can't be read are cut: {told}" in caplog.text


def test_a_directory_with_the_name_of_a_part_is_none(tmp_path):
    (tmp_path / "samples.00000099.jsonl").mkdir()
    fill(tmp_path / "samples.jsonl", [1, 2], part_bytes=1 << 30)
    assert len(parts(tmp_path / "samples.jsonl")) == 1 and cut(tmp_path / "samples.jsonl", 1).step == 1


def test_a_bound_deletes_parts_after_the_first_and_no_bound_none(tmp_path):
    for name, most in (("samples.jsonl", 1000), ("metrics.jsonl", None)):
        fill(tmp_path / name, range(1, 200), part_bytes=200, most_bytes=most)
    assert [entry["step"] for entry in read(tmp_path / "metrics.jsonl")] == list(range(1, 200))
    kept = [entry["step"] for entry in read(tmp_path / "samples.jsonl")]
    first = len(parts(tmp_path / "samples.jsonl")[0].read_text().splitlines())
    gap = kept[first] - first - 1
    assert gap > 0 and kept == [*range(1, first + 1), *range(first + 1 + gap, 200)]
    assert 600 < sum(part.stat().st_size for part in parts(tmp_path / "samples.jsonl")) <= 1000


@pytest.mark.parametrize("step", [0, 5, 11, 12, 13, 30])
def test_a_cut_that_a_kill_interrupts_is_done_by_the_next_one(tmp_path, step, monkeypatch):
    """At any of its renames."""

    class Killed(BaseException):
        pass

    def after(count):
        def replace(*names):
            nonlocal count
            if not count:
                raise Killed
            count -= 1
            rename(*names)

        return replace

    rename = os.replace
    for kills in range(20):
        path = tmp_path / str(kills) / "metrics.jsonl"
        path.parent.mkdir()
        fill(path, range(1, 25), part_bytes=100)
        monkeypatch.setattr(os, "replace", after(kills))
        try:
            cut(path, step)
            done = True
        except Killed:
            done = False
        monkeypatch.setattr(os, "replace", rename)
        found = cut(path, step)
        assert [entry["step"] for entry in read(path)] == list(range(1, min(step, 24) + 1))
        assert found.step == (min(step, 24) or None)
        if done:
            return
    raise AssertionError("the cut never ended")


def test_the_ends_of_a_file_are_its_first_and_last_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 1001), part_bytes=2000)
    whole = list(lines(path))
    size = sum(map(len, whole))
    assert list(ends(path, size)) == whole
    some = list(ends(path, size // 5))
    first = next(n for n, (a, b) in enumerate(zip(some, whole, strict=False)) if a != b)
    assert some == whole[:first] + whole[first - len(some) :]
    assert 0.9 * size / 5 < sum(map(len, some)) <= size / 5 and abs(first - len(some) / 2) < 5


def test_a_tail_follows_a_file_into_its_next_parts(tmp_path):
    path = tmp_path / "samples.jsonl"
    file, tail = LineFile(path, 0, part_bytes=100), Tail(path)
    seen = []
    for step in range(1, 40):
        file.append(step, line_of(step, step))
        if step % 7 == 0:  # several parts at once
            seen += tail.read()
    seen += tail.read()
    file.close()
    assert len(parts(path)) > 7 and [each["step"] for each in seen] == list(range(1, 40))


def test_a_run_in_parts_has_the_history_of_one_without(tmp_path):
    """And metrics of a step merge, also behind the end of a part and of a run that goes on."""
    histories = []
    for name, part_mb in (("whole", 64), ("parted", 0)):  # 0: each step a part
        run = RunDirectory(tmp_path / name)
        for first_step in (0, 3):
            logger = StatsLoggerConfig(part_mb=part_mb)
            sink = RunDirectorySink(run, None, first_step=first_step, logger=logger)
            if first_step:
                sink.write(first_step, {"late": Mean(1.0, 1)})
            for step in range(first_step + 1, first_step + 5):
                sink.write(step, {"rollout/reward": Mean.of([0.0, 1.0])})
                sink.write(step, {"loss": Mean(math.nan if step == 2 else step, 1)})
                sink.event(Event(step, "max_grad_norm", "m", 9.0, 1.0, "warn", ""))
            sink.close()
        run.close()
        histories.append(History.load(run.path))
    whole, parted = histories
    assert len(parts(tmp_path / "parted" / "metrics.jsonl")) == 7 and len(parts(tmp_path / "whole" / "metrics.jsonl")) == 1
    assert parted.steps.tolist() == whole.steps.tolist() == list(range(1, 8))
    assert {name: list(map(str, values)) for name, values in parted.series.items()} == {
        name: list(map(str, values)) for name, values in whole.series.items()
    }
    assert whole["late"].steps.tolist() == [3] and list(parted.guard) == list(whole.guard) and not parted.damage


def bytes_read() -> int:
    """Bytes that this process has read so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts no reads")
def test_a_resume_reads_as_much_of_a_long_run_as_of_one_that_is_half_as_long(tmp_path, monkeypatch):
    """Counts reads of one file, as of an older release, and of parts with lines to cut."""
    monkeypatch.setattr("rljax.run.verdicts.MOST_MB", 1)
    monkeypatch.setattr(json_lines, "CHECKED", 1 << 18)
    names = ("metrics.jsonl", "samples.jsonl", "histograms.jsonl", "guard.jsonl", "groups.jsonl", "eval_samples.jsonl")

    def read_in_resume(folder, steps, lost, part_bytes):
        folder.mkdir()
        for name in names:
            file = LineFile(folder / name, 0, part_bytes=part_bytes)
            for step in range(1, steps + 1):
                file.append(step, json.dumps({"step": step, "text": "x" * 4000}))
            file.close()
        run = RunDirectory(folder)
        before = bytes_read()
        RunDirectorySink(run, None, first_step=steps - lost, logger=StatsLoggerConfig()).close()
        Verdicts(Config(), run.path, steps - lost)
        read = bytes_read() - before
        run.close()
        assert [entry["step"] for entry in map(json.loads, lines(folder / "samples.jsonl"))] == [*range(1, steps - lost + 1)]
        return read

    read_in_resume(tmp_path / "imports", 1, 0, 1 << 30)
    for number, (lost, part_bytes) in enumerate([(0, 1 << 30), (50, 200_000)]):
        short, long = (read_in_resume(tmp_path / f"{number}-{steps}", steps, lost, part_bytes) for steps in (500, 1000))
        assert short > 1 << 20 and abs(long - short) < 1 << 18  # while the long one has 12 MB more
