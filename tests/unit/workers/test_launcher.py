"""Worker processes that a run starts: kept running, told from bad input, ended with it."""

import asyncio
import sys

import psutil
import pytest

from rljax.errors import TooManyFailures, UserError
from rljax.workers import launcher as children
from rljax.workers.launcher import MAX_DEATHS, WorkerProcesses


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("rljax.rollout.producer.FIRST_DELAY", 1e-3)
    monkeypatch.setattr(children, "GRACE", 1.0)


def _kept(tmp_path, code, *, count=1, until, worked=lambda kept: None):
    """Runs the children until `until(errors, pids)`; returns the errors and the command lines they
    had.
    """
    errors, seen = [], []

    async def scenario():
        others = {p.pid for p in psutil.Process().children()}  # of tests before this one
        kept = WorkerProcesses([sys.executable, "-c", code], count, tmp_path / "logs")
        kept.start("127.0.0.1:1", "a secret", errors.append)
        async with asyncio.timeout(30):
            while not until(errors, seen):
                seen.extend(p.pid for p in psutil.Process().children() if p.pid not in others.union(seen))
                worked(kept)
                await asyncio.sleep(0.01)
        await kept.close()

    asyncio.run(scenario())
    assert not any(psutil.pid_exists(pid) for pid in seen)
    return errors, seen


def test_bad_input_is_the_runs_error_at_once(tmp_path):
    code = "import sys; print('error: rollout.workflow: no such module', file=sys.stderr); sys.exit(1)"
    errors, _ = _kept(tmp_path, code, until=lambda errors, seen: errors)
    (error,) = errors
    assert isinstance(error, UserError) and str(error) == "rollout.workflow: no such module"


def test_a_worker_that_lost_the_run_is_no_bad_input(tmp_path):
    """Nothing listens at the address, as for a worker that was stopped for longer than SILENCE."""
    code = "from rljax.experiments import main, rollout; main.run_main(rollout.rollout)"
    log = tmp_path / "logs" / "0.log"
    lost = lambda errors, seen: errors or (log.exists() and "error: --attach: 127.0.0.1:1: " in log.read_text())  # noqa: E731
    again = lambda errors, seen: lost(errors, seen) and (errors or len(seen) > 1)  # noqa: E731
    errors, _ = _kept(tmp_path, code, until=again)
    assert not errors


def test_those_that_die_are_started_again_until_it_leads_nowhere(tmp_path):
    code = "import os, sys; print('before the end', flush=True); os.kill(os.getpid(), 9)"
    errors, _ = _kept(tmp_path, code, until=lambda errors, seen: errors)
    (error,) = errors
    assert (
        isinstance(error, TooManyFailures) and f"worker 0 died {MAX_DEATHS} times" in str(error) and "status -9" in str(error)
    )
    assert "before the end" in str(error.__cause__)
    assert (tmp_path / "logs" / "0.log").read_text().count("before the end") == MAX_DEATHS


def test_a_death_of_all_workers_at_once_is_one_of_each(tmp_path):
    """A machine that sleeps for longer than the trainer waits does that: each worker ends, and goes on anew."""
    count, logs = MAX_DEATHS + 1, tmp_path / "logs"
    code = f"""
import pathlib, sys, time
first = not pathlib.Path(r"{tmp_path}", sys.argv[-1].removeprefix("--name=")).exists()
pathlib.Path(r"{tmp_path}", sys.argv[-1].removeprefix("--name=")).touch()
if first:
    sys.exit(2)
print("again", flush=True)
time.sleep(60)
"""
    again = lambda errors, seen: all(_text(logs / f"{index}.log") == "again\n" for index in range(count))  # noqa: E731
    errors, _ = _kept(tmp_path, code, count=count, until=lambda errors, seen: errors or again(errors, seen))
    assert not errors


def _text(path):
    return path.read_text() if path.exists() else ""


def test_a_group_between_two_deaths_counts_for_the_workers(tmp_path):
    log = tmp_path / "logs" / "0.log"
    many = lambda errors, seen: log.exists() and log.read_text().count("x") > 2 * MAX_DEATHS  # noqa: E731
    errors, _ = _kept(tmp_path, "print('x'); raise SystemExit(2)", until=many, worked=WorkerProcesses.reset_deaths)
    assert not errors


def test_each_knows_where_to_go_and_nobody_reads_the_token_off_its_command_line(tmp_path):
    code = "import os, sys, time; print(sys.argv[1:], os.environ['RLJAX_TOKEN'], flush=True); time.sleep(60)"
    logs = tmp_path / "logs"
    told = lambda errors, seen: all("secret" in (logs / f"{i}.log").read_text() for i in (0, 1) if logs.exists())  # noqa: E731
    _kept(tmp_path, code, count=2, until=lambda errors, seen: len(seen) == 2 and told(errors, seen))
    for index in (0, 1):
        text = (logs / f"{index}.log").read_text()
        assert "--attach=127.0.0.1:1" in text and f"--name={index}" in text and text.count("a secret") == 1
