"""The trace of whole runs, as Perfetto reads it: the spans that a reader needs, counted."""

import asyncio
from collections import Counter

from rljax import loop, tracing
from rljax.loop import Loop
from rljax.testing.harness import Repeat, make_run, worker
from tests.unit.tracing.trace_processor import query

TRACED = {"rollout.enable_rollout_tracing": True, "rollout.max_head_offpolicyness": 1}
SLICES = """
select s.name, s.dur, parent.name as parent, thread.name as track, process.name as process,
       extract_arg(s.arg_set_id, 'args.uid') as uid
from slice s join thread_track on s.track_id = thread_track.id join thread using (utid) join process using (upid)
left join slice parent on s.parent_id = parent.id
"""
WRONG = "select name, value from stats where severity != 'info' and value > 0"


class WithTool(Repeat):
    """Calls a tool before it answers, as a workflow of a user's would."""

    async def episode(self, generator, prompt, params, seed):
        with tracing.span("tool", tool="nothing"):
            await asyncio.sleep(0)
        return await super().episode(generator, prompt, params, seed)


def test_a_run_has_the_spans_that_a_reader_needs(tmp_path):
    """12 prompts with 4 trajectories each, in 3 steps of 4 groups, and no error of Perfetto's."""
    run = make_run(tmp_path, TRACED | {"evaluator.freq_steps": 3, "saver.freq_steps": 3}, workflow=WithTool())
    loop.train(run)
    slices, wrong = query(tmp_path / "trace.json", SLICES, WRONG)
    counts = Counter((s["parent"], s["name"]) for s in slices)
    expected = {
        (None, "trajectory"): 48,
        ("trajectory", "tool"): 48,
        ("trajectory", "generate"): 48,
        (None, "wait in buffer"): 12,
        (None, "step"): 3,
        ("step", "update"): 3,
        ("step", "publish"): 3,
        ("publish", "load weights"): 3,
        (None, "evaluation"): 24,  # of 12 prompts, before the first step and after the last
        (None, "save"): 2,  # after the last step, and at the end
    }
    assert {key: counts[key] for key in expected} == expected
    assert all(s["dur"] >= 0 for s in slices), "every span has ended"
    assert {s["uid"] for s in slices if s["name"] == "trajectory"} == {f"0/{index}" for index in range(12)}
    lanes = Counter(s["track"].rpartition(" ")[0] for s in slices if s["name"] == "trajectory")
    assert lanes == {"trajectory": 48}
    assert {s["track"] for s in slices if s["name"] in ("update", "wait for a batch")} == {"loop"}
    assert not wrong


def test_workers_are_processes_of_the_trace(tmp_path):
    run = make_run(tmp_path, TRACED, by_workers=True)

    async def scenario():
        beside = [asyncio.create_task(worker(tmp_path, workflow=WithTool(), name=name)) for name in ("left", "right")]
        await asyncio.wait_for(Loop(run).run(), 60)
        await asyncio.gather(*beside)

    asyncio.run(scenario())
    (slices,) = query(tmp_path / "trace.json", SLICES)
    by_process = Counter((s["process"], s["name"]) for s in slices)
    for name in ("trajectory", "tool"):
        assert by_process["worker left", name] + by_process["worker right", name] == 48
        assert by_process["trainer", name] == 0
    assert by_process["trainer", "update"] == 3


def test_a_run_without_tracing_writes_none(tmp_path):
    loop.train(make_run(tmp_path))
    assert not list(tmp_path.glob("trace*"))


def test_tracing_changes_nothing_else(tmp_path):
    runs = [make_run(tmp_path / name, {"rollout.enable_rollout_tracing": name == "traced"}) for name in ("traced", "plain")]
    for run in runs:
        loop.train(run)
    assert runs[0].engine.learner.trained == runs[1].engine.learner.trained
