"""No task dies unseen: those that nobody awaits are started by `Tasks`, which tells of their errors."""

import ast
import asyncio
import logging

import pytest

from rljax.process.tasks import Tasks
from tests.shared import REPOSITORY

STARTERS = {"create_task", "ensure_future"}
# Where tasks are started otherwise, by file and function, and who sees the error of such a task
SEEN = {
    ("rljax/sanity/trial.py", "__init__"): "`wait`, and its callback after that",
    ("rljax/process/tasks.py", "start"): "its callback",
    ("engines/http/calls.py", "post_unless_lost"): "`unless_lost`, which waits for it",
    ("engines/http/calls.py", "each"): "`unless_lost`, which waits for it",
    ("rljax/checkpoints/recovery.py", "save"): "`check` at the next step, `settle` and `close`",
    ("rljax/loop.py", "_wait_for_any"): "the waits end with the call, which cancels them",
    ("rljax/loop.py", "_await_evaluation"): "a wait for an event, cancelled at the end",
    ("rljax/run/evaluator.py", "begin"): "`take`, which each step calls",
    ("rljax/run/sampling.py", "start"): "`_take`, which each step calls",
    ("rljax/driver.py", "_begin"): "`_collect`",
    ("rljax/driver.py", "_run"): "run_until_complete",
    ("rljax/driver.py", "batch"): "the same call, or the next",
    ("rljax/agents/exchange.py", "run"): "the task tells its errors to a queue",
    ("rljax/rollout/gathering.py", "_call_if_complete"): "the futures of those who wait for it",
    ("rljax/rollout/producer.py", "run"): "a TaskGroup",
    ("rljax/multiprocess/leader.py", "watched"): "awaited there",
    ("rljax/rewards/pool.py", "running"): "awaited there",
    ("rljax/rewards/process.py", "start"): "`ended`; calls fail with what it raised",
    ("rljax/rewards/process.py", "_read"): "awaited there",
    ("rljax/rewards/process_main.py", "_serve_async"): "every error is an answer",
    ("rljax/workers/server.py", "_task"): "its callback, which ends the run",
    ("engines/http/client.py", "_attempt"): "awaited there",
    ("engines/http/health.py", "_return"): "awaited there",
    ("engines/http/generation.py", "__init__"): "`wait`",
    ("engines/cuda/transports/broadcast.py", "_send_bucket"): "awaited there",
}


def _started(path):
    """Yields (function, line) of each start of a task in a file."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call) and getattr(child.func, "attr", None) in STARTERS:
                yield function, child.lineno
            yield from visit(child, name)

    yield from visit(ast.parse(path.read_text()), "")


def test_every_task_is_seen_by_somebody():
    found = set()
    for folder in ("rljax", "engines", "backends"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            name = str(path.relative_to(REPOSITORY))
            if name.startswith(("rljax/engines/", "rljax/backends/", "rljax/experiments/", "rljax/testing/")):
                continue
            for function, line in _started(path):
                found.add((name, function))
                assert (name, function) in SEEN, f"{name}:{line}: use rljax.process.tasks.Tasks, or say here who sees its error"
    assert found == set(SEEN)  # no entry is out of date


@pytest.mark.parametrize("closing", [False, True])
def test_an_error_is_logged_and_told_unless_all_is_closing(caplog, closing):
    told = []

    async def main():
        tasks = Tasks(told.append)

        async def fails():
            try:
                await asyncio.sleep(60 if closing else 0)
            finally:
                raise LookupError("the reason")

        tasks.start(fails(), "a task of ours")
        await asyncio.sleep(0)
        if closing:
            await tasks.close()
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "the task 'a task of ours' ended: LookupError: the reason" in caplog.text
    assert [str(error) for error in told] == ([] if closing else ["the reason"])
