"""The measurements on several GPUs: what is checked, the table, going on from results, and the
whole of it in small on the CPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from rljax.config.allocation import Pool, parse
from rljax.engine import (
    Engine,
    ExportToDirectory,
    ExportToSampler,
    WeightsInDirectory,
    WeightsInMemory,
    find_plugin,
    private_directory,
    remove_private,
)
from rljax.errors import SamplerError, UserError
from rljax.experiments.bench.several import engines, faults, runs
from rljax.experiments.bench.several.case import PARTS, Case, cards_of
from rljax.experiments.bench.several.cases import cases
from rljax.experiments.bench.several.checks import BOUNDS, CHECKS, check
from rljax.experiments.bench.several.place import Place, end
from rljax.experiments.bench.several.processes import Spans, await_that, children, command_of
from rljax.experiments.bench.several.results import FILE, Result, Results
from rljax.experiments.bench.several.side_by_side import side_by_side
from rljax.experiments.bench.several.table import TABLES, markdown
from rljax.testing.harness import make_config
from rljax.tracing.events import Event, encode
from tests.shared import REPOSITORY, sglang_python

MACHINE = {"device": "cpu", "rehearsed": False, "versions": "torch 1", "SGLang": ""}
LOSS, NORM = BOUNDS["bfloat16"].loss, BOUNDS["bfloat16"].gradient


def learner(mode, **changes):
    tokens = 1000 * cards_of(mode)  # a second, on a machine where cards don't wait for each other
    row = {"case": f"learners/m {mode}", "mode": mode, "shape": "m", "dtype": "bfloat16", "ms": 10.0, "mfu": None}
    return (
        row
        | {"tokens_per_s": tokens, "loss": 0.5, "scale": 1.0, "grad_norm": 2.0, "peak_gb": 10.0, "planned_gb": 10.0}
        | changes
    )


def sampler(mode, **changes):
    row = {"case": f"samplers/{mode}", "mode": mode, "requests": 256, "tokens": 1000, "tokens_per_s": 100, "peak_gb": None}
    return row | changes


def run(mode, **changes):
    row = {"case": f"runs/{mode}", "mode": mode, "state": "finished", "steps": 20, "asked": 20, "batch": 64, "groups": 1280.0}
    row |= {
        "dropped": 0,
        "fell_back": 0,
        "lag": 2,
        "lag_least": 0,
        "lag_bound": 2,
        "reward_first": 0.1,
        "reward_last": 0.6,
        "reward_error": 0.01,
    }
    row |= {"first_step": 1, "last_step": 20, "median": dict.fromkeys((*runs.PHASES, "wait"), 0.5)}
    return row | changes


def publish(mode, **changes):
    row = {
        "case": f"publish/{mode}",
        "model": "0.6b",
        "mode": mode,
        "transport": "nccl",
        "decoding": 0,
        "before": 1.0,
        "error": 0.01,
    }
    return row | {"seconds": 0.1, "least": 0.1, "first": 1.0, "export": 0.0} | changes


def fault(*, survived, **changes):
    row = {
        "case": "faults/x",
        "fault": "x",
        "mode": "sglang:d2|fsdp:f2",
        "bound_s": 60.0,
        "survived": survived,
        "went_on": survived,
    }
    row |= {"after": 2, "step_s": 5.0, "dropped": 0, "seconds": 30.0, "exit_status": None if survived else 1}
    return row | {"state": "running" if survived else "failed", "said": "rank 1 was killed"} | changes


SOUND = {
    "learners": [learner("fsdp:d1"), learner("fsdp:f2"), learner("jax:d1"), learner("jax:f4")],
    "samplers": [sampler("jax:d1"), sampler("jax:d2"), sampler("sglang:d2")],
    "runs": [run("jax:d1+jax:d1"), run("sglang:d2|fsdp:f2")],
    "publish": [publish("sglang:d1+fsdp:d1")],
    "faults": [fault(survived=True), fault(survived=False)],
    "move": [run("jax:d1", case="move/x"), run("fsdp:d1", case="move/x", first_step=21, last_step=40)],
}
FAULTY = [  # part, row, what is off, and which check sees it
    ("learners", 1, {"loss": 0.5 + 1.1 * LOSS}, "loss"),
    ("learners", 1, {"loss": float("nan")}, "loss"),
    ("learners", 3, {"grad_norm": 2 * (1 + 1.1 * NORM)}, "gradient norm"),
    ("learners", 3, {"grad_norm": 0.0}, "gradient norm"),
    ("learners", 3, {"grad_norm": float("inf")}, "gradient norm"),
    ("learners", 3, {"tokens_per_s": 0.84 * 4000}, "tokens/s a card"),
    ("learners", 0, {"planned_gb": 11.5}, "peak memory"),
    ("samplers", 2, {"tokens": 999}, "tokens"),
    ("runs", 1, {"state": "incomplete"}, "steps"),
    ("runs", 1, {"steps": 19, "groups": 19 * 64}, "steps"),
    ("runs", 1, {"groups": 1279}, "groups"),
    ("runs", 0, {"dropped": 1}, "groups"),
    ("runs", 1, {"fell_back": 1}, "transport"),
    ("runs", 1, {"lag": 3}, "lag"),
    ("runs", 1, {"lag_least": -1}, "lag"),
    ("runs", 1, {"reward_last": 0.3}, "curves"),
    ("publish", 0, {"error": 0.9}, "weights by nccl"),
    ("faults", 0, {"went_on": False}, "outcome"),
    ("faults", 0, {"seconds": 71.0}, "seconds"),
    ("faults", 0, {"dropped": 1}, "groups"),
    ("faults", 1, {"went_on": True}, "outcome"),
    ("faults", 1, {"said": ""}, "outcome"),
    ("faults", 1, {"exit_status": 3}, "outcome"),
    ("faults", 1, {"seconds": 61.0}, "seconds"),
    ("move", 1, {"first_step": 20}, "goes on, fsdp:d1"),
]


def wrong(rows, **settings):
    return {(one.case, one.what) for one in check(rows, **{"rehearsed": False} | settings) if one.ok is False}


def test_sound_results_pass_and_each_part_is_checked():
    assert CHECKS.keys() == TABLES.keys() == SOUND.keys() == set(PARTS)
    assert wrong(SOUND) == set()


@pytest.mark.parametrize(("part", "index", "changes", "what"), FAULTY, ids=lambda value: str(value))
def test_a_number_that_is_off_fails_its_check_alone(part, index, changes, what):
    rows = [row | (changes if at == index else {}) for at, row in enumerate(SOUND[part])]
    assert wrong(SOUND | {part: rows}) == {(rows[index]["case"], what)}


def test_a_rehearsal_judges_neither_speed_nor_memory():
    rows = [row | {"tokens_per_s": 1, "peak_gb": 1.0} if at else row for at, row in enumerate(SOUND["learners"])]
    assert {what for _, what in wrong({"learners": rows})} == {"tokens/s a card", "peak memory"}
    assert not wrong({"learners": rows}, rehearsed=True)


def test_cards_are_those_of_the_allocation():
    modes = {*engines.FSDP, *engines.JAX, *engines.SAMPLERS, *engines.PUBLISHES, *engines.LARGE, *runs.MODES, *runs.MOVE}
    for mode in modes | {"jax:d2t2+jax:f4", "sglang:d4t2|fsdp:f8"}:
        assert cards_of(mode) == parse(mode, find_plugin).devices, mode


def test_every_case_has_a_name_of_its_own_and_the_parts_stand_in_order(tmp_path):
    for rehearse in (False, True):
        found = cases(Place(tmp_path, tmp_path, cards=8, rehearse=rehearse))
        assert len({case.name for case in found}) == len(found) and max(case.cards for case in found) == 8
        assert list(dict.fromkeys(case.part for case in found)) == list(PARTS)
        assert all(case.seconds < 540 for case in found)  # docs/testing.md: pieces of less than ten minutes


def test_the_table_has_the_numbers_of_every_row_in_columns():
    text = markdown(MACHINE | {"date": "2026-11-29"}, SOUND)
    assert text.splitlines()[0] == "cpu; torch 1; 2026-11-29" and "rehears" not in text
    assert "rehears" in markdown(MACHINE | {"date": "2026-11-29", "rehearsed": True}, SOUND)
    for part, rows in SOUND.items():
        lines = text.split(f"### {part}\n\n")[1].split("\n\n")[0].splitlines()
        assert len(lines) == 2 + len(rows)
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
        for row, line in zip(rows, lines[2:], strict=True):
            assert row["mode"].replace("|", "\\|") in line
    shares = [line.split("|")[5].strip() for line in text.splitlines() if line.startswith("| m |")]
    assert shares == ["100%"] * len(SOUND["learners"])
    assert markdown(MACHINE | {"date": "d"}, {"runs": SOUND["runs"]}).count("###") == 1


def test_side_by_side_no_card_is_shared_and_all_are_used(tmp_path):
    lock, held, peak, order = threading.Lock(), set[str](), [0], list[str]()
    sizes = [2, 1, 4, 1, 1, 2, 4, 1]
    todo = [Case("runs", str(index), size, 1.0, None) for index, size in enumerate(sizes)]
    meeting = threading.Barrier(4)

    def measure(case, taken, beside):
        with lock:
            assert len(taken) == case.cards and not held.intersection(taken), (held, taken)
            held.update(taken)
            peak[0] = max(peak[0], len(held))
            order.append(case.name)
        if case.cards == 1:
            meeting.wait(60)  # only if all four run at once do they go on
        with lock:
            held.difference_update(taken)
        assert beside() == {1: 3, 2: 1, 4: 0}[case.cards] or case.cards == 2

    assert side_by_side(todo, ["4", "5", "6", "7"], lambda case: True, measure) == []
    assert sorted(order) == sorted(case.name for case in todo) and peak == [4]
    assert [sizes[int(name.removeprefix("runs/"))] for name in order] == sorted(sizes)


def test_side_by_side_a_case_that_fails_gives_its_cards_back_and_none_begins_without_time(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    todo = [Case("runs", str(index), 2, 1.0, None) for index in range(3)]
    begun = []

    def measure(case, taken, beside):
        begun.append(case.name)
        sys.exit(1)  # ends the thread without a word

    left = side_by_side(todo, ["0", "1"], lambda case: len(begun) < 2, measure)
    assert len(begun) == 2 and [case.name for case in left] == ["runs/2"]


def test_programs_of_a_case_see_its_cards_alone_and_all_are_known_to_the_place(tmp_path):
    place = Place(tmp_path, tmp_path, cards=2)
    one = dataclasses.replace(place, visible=("1",))
    assert one.environment()["CUDA_VISIBLE_DEVICES"] == "1"
    assert place.environment().get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    program = one.start("runs/a", "bench.several_gpus", ["--help"])
    end(program)
    assert place.programs == [program]


def test_results_are_gone_on_from_and_what_failed_is_done_again(tmp_path):
    results = Results(tmp_path, MACHINE)
    results.add("runs/a", Result([{"mode": "a"}], 1.0))
    results.add("runs/b", Result([], 1.0, "exit status 1"))
    again = Results(tmp_path, MACHINE)
    assert again.done("runs/a") and not again.done("runs/b") and not again.done("runs/c")
    assert again.rows("runs") == [{"case": "runs/a", "beside": 0, "mode": "a"}] and again.rows("samplers") == []
    again.add("runs/b", Result([{"mode": "b"}], 1.0))
    assert Results(tmp_path, MACHINE).done("runs/b")


def test_results_of_another_machine_and_other_files_are_refused(tmp_path):
    Results(tmp_path, MACHINE).add("runs/a", Result([], 1.0))
    with pytest.raises(UserError, match="device 'cpu', and here it is 'H200'"):
        Results(tmp_path, MACHINE | {"device": "H200"})
    Results(tmp_path, MACHINE | {"SGLang": "0.5.17"}).add("runs/b", Result([], 1.0))  # of the first call it was not asked
    assert Results(tmp_path, MACHINE).machine["SGLang"] == "0.5.17"
    with pytest.raises(UserError, match=r"SGLang '0\.5\.17'"):
        Results(tmp_path, MACHINE | {"SGLang": "0.5.23"})
    for text in ("[]", "{", '{"machine": {}, "results": {"a": {"b": 1}}}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match="holds no results"):
            Results(tmp_path, MACHINE)


def test_bounds_of_faults_follow_the_run(tmp_path):
    """A longer recover.hang_timeout makes a publish's bound longer, and no rank's."""
    short, long = (make_config({"recover.hang_timeout": seconds}) for seconds in (400.0, 800.0))
    assert faults.lost_after(long) - faults.lost_after(short) == 3 * (long.control_timeout - short.control_timeout) > 0
    assert faults.rank_lost(long) == faults.rank_lost(short) <= 60.0  # docs/processes.md: within a minute


def test_open_spans_are_read_as_they_come(tmp_path):
    file = tmp_path / "trace.json"
    spans = Spans(file)
    assert spans.open() == set()
    lines = [encode(Event(phase, 1, 5, 0, name, {}), 7, 2, 0) for phase, name in (("B", "step"), ("B", "update"), ("E", ""))]
    file.write_text("[\n" + lines[0] + ",\n" + lines[1][:10])
    assert spans.open() == {"step"}
    with file.open("a") as more:
        more.write(lines[1][10:] + ",\n")
    assert spans.open() == {"step", "update"}
    with file.open("a") as more:
        more.write(lines[2] + ",\n" + encode(Event("X", 1, 5, 3, "pack", {}), 7, 2, 0) + ",\n")
    assert spans.open() == {"step"}


def test_processes_below_a_run_are_found():
    with subprocess.Popen(["sh", "-c", "sleep 71 & sleep 72 & wait"]) as shell:
        assert await_that(lambda: len(children(shell.pid)) == 2, 10.0, lambda: True)
        found = children(shell.pid)
        try:
            assert await_that(lambda: {command_of(pid) for pid in found} == {"sleep 71 ", "sleep 72 "}, 10.0, lambda: True)
        finally:
            for pid in found:
                subprocess.run(["kill", str(pid)], check=True)
    assert children(shell.pid) == []


class OfOneTransport:
    """A learner, and a sampler that takes no weights from memory."""

    def export(self, target):
        if isinstance(target, ExportToDirectory):
            target.directory.mkdir()
            return WeightsInDirectory(target.directory)
        return WeightsInMemory({})

    async def pause(self): ...

    async def resume(self): ...

    async def load_weights(self, source, version):
        if isinstance(source, WeightsInMemory):
            raise SamplerError("the server is gone")


@pytest.mark.parametrize(("in_memory", "found"), [(ExportToSampler("memory", Pool("jax")), 3), (None, 0)])
def test_publishes_that_fell_back_are_counted_from_the_log(in_memory, found, tmp_path):
    logger, handler = logging.getLogger("rljax"), logging.FileHandler(tmp_path / "log.txt")
    logger.addHandler(handler)
    both = OfOneTransport()
    publish_dir = private_directory(tmp_path, "test")
    try:
        for version in range(1, 4):
            asyncio.run(Engine(both, both, in_memory, publish_dir).publish(version))
    finally:
        remove_private(publish_dir)
        logger.removeHandler(handler)
        handler.close()
    assert runs.fell_back(tmp_path) == found and runs.fell_back(tmp_path / "nowhere") == 0


def bench(out, *flags):
    command = [sys.executable, "-m", "experiments.bench.several_gpus", f"--out={out}", f"--scratch={out}-scratch", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_it_says_first_what_it_does_and_what_it_leaves_out(tmp_path):
    done = bench(tmp_path / "out", "--rehearse", "--cards=2", "--part=learners,samplers", "--minutes=0")
    assert done.returncode == 0, done.stderr
    said = dict(line.strip().rsplit("  ", 1) for line in done.stdout.splitlines() if line.startswith("  "))
    said = {name.strip(): text.strip() for name, text in said.items()}
    assert said["learners/tiny fsdp:f2"] == "to do" and said["learners/tiny jax:f4"] == "left out: takes 4 cards"
    assert said["samplers/sglang:d1"] == "left out: needs SGLang (--sglang_python)"
    todo = [name for name, text in said.items() if text == "to do"]
    assert f"--minutes: {len(todo)} cases left" in done.stdout and (tmp_path / "out" / "table.md").is_file()


SLOW = pytest.mark.slow  # a second each, for the same path to an error


@pytest.mark.parametrize(
    ("flag", "culprit"),
    [
        ("--model=nosuch", "--model: no config.json"),
        pytest.param("--part=nosuch", "--part: no 'nosuch'", marks=SLOW),
        pytest.param("--only=nosuch", "--only: no case", marks=SLOW),
    ],
)
def test_bad_input_is_one_line(flag, culprit, tmp_path):
    done = bench(tmp_path / "out", "--rehearse", flag)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and culprit in line


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rehearsal_gives_the_numbers_of_one_card_on_several(tmp_path):
    """Layouts of both learners, a sampler, a run on meshes, and the same command again."""
    out = tmp_path / "out"
    for flags in (
        ("--part=learners", "--only=f2"),
        ("--part=learners", "--only=d1"),
        ("--part=samplers,runs,publish", "--only=jax:d2"),
    ):
        done = bench(out, "--rehearse", *flags, "--cards=4")
        assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / FILE).read_text())["results"]
    rows = {name: result["rows"] for name, result in results.items()}
    learners = [row for name, found in rows.items() if name.startswith("learners/") for row in found]
    assert {row["mode"] for row in learners} == {"fsdp:d1", "fsdp:f2", "fsdp:f2t2", "jax:d1", "jax:f2", "jax:f2t2"}
    first, bounds = learners[0], BOUNDS["float32"]
    for row in learners:
        assert row["grad_norm"] == pytest.approx(first["grad_norm"], rel=bounds.gradient)
        assert row["loss"] == pytest.approx(first["loss"], abs=bounds.loss * first["scale"])
    (ran,) = rows["runs/jax:d2+jax:f2"]
    assert ran["groups"] == runs.REHEARSED_STEPS * ran["batch"] and ran["lag"] <= ran["lag_bound"]
    assert {row["transport"] for row in rows["publish/tiny jax:d2+jax:f2"]} == {"memory", "directory"}
    assert not [line for line in (out / "checks.txt").read_text().splitlines() if line.startswith("WRONG")]
    again = bench(out, "--rehearse", *flags, "--cards=4")
    assert again.returncode == 0 and "0 of 3 cases to do" in again.stdout
    assert json.loads((out / FILE).read_text())["results"] == results


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "fault", ["kill -9 of a rank in an update, jax:d1+fsdp:f2", "kill -9 of a server between buckets, sglang:d1+fsdp:d1"]
)
def test_a_fault_of_a_real_run_ends_or_is_survived_within_its_bound(fault, tmp_path):
    sglang = [f"--sglang_python={sglang_python()}"] if "sglang" in fault else []
    done = bench(tmp_path / "out", "--rehearse", "--part=faults", f"--only={fault}", *sglang)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "out" / FILE).read_text())["results"][f"faults/{fault}"]["rows"]
    assert row["went_on"] == row["survived"] == ("server" in fault)
    assert row["survived"] or (row["exit_status"] == 1 and "rank 1" in row["said"] and "SIGKILL" in row["said"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_moves_to_the_other_learner_and_back(tmp_path):
    done = bench(tmp_path / "out", "--rehearse", "--part=move", f"--only={' > '.join(runs.OUR_MOVE)}")
    assert done.returncode == 0, done.stdout + done.stderr
    (rows,) = [each["rows"] for each in json.loads((tmp_path / "out" / FILE).read_text())["results"].values()]
    each = runs.REHEARSED_STEPS // 2
    assert [(row["mode"], row["first_step"], row["last_step"]) for row in rows] == [
        (mode, turn * each + 1, (turn + 1) * each) for turn, mode in enumerate(runs.OUR_MOVE)
    ]
