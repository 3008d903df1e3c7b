"""A run that hangs is ended with an account; one that moves is left alone."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rljax.process.watchdog import EXIT_HANG, Watchdog

PREAMBLE = "import asyncio, sys, time\nfrom pathlib import Path\nfrom rljax.process import watchdog\n"
OUTPUT = {"capture_output": True, "text": True, "timeout": 60}


def _run(tmp_path, body):
    report = tmp_path / "hang.txt"
    done = subprocess.run([sys.executable, "-c", PREAMBLE + textwrap.dedent(body), str(report)], **OUTPUT)
    return done, report.read_text() if report.exists() else ""


def test_a_task_that_never_ends_is_named(tmp_path):
    done, report = _run(
        tmp_path,
        """
        async def waits_for_a_reward_that_never_comes():
            await asyncio.Event().wait()

        async def main():
            with watchdog.Watchdog(0.3, Path(sys.argv[1])) as dog:
                dog.beat("update")
                await asyncio.create_task(waits_for_a_reward_that_never_comes(), name="group 0/17")

        asyncio.run(main())
        """,
    )
    assert done.returncode == EXIT_HANG
    for text in (done.stderr, report):
        assert "nothing has moved for 0.3 s (recover.hang_timeout) since 'update'" in text
        assert "group 0/17" in text and "waits_for_a_reward_that_never_comes" in text
        assert "most recent call first" in text  # every thread's stack


def test_the_innermost_frame_of_a_suspended_task_is_named(tmp_path):
    done, report = _run(
        tmp_path,
        """
        async def tool_of_the_user():
            await asyncio.Event().wait()

        async def episode():
            async with asyncio.timeout(60):
                await tool_of_the_user()

        async def main():
            with watchdog.Watchdog(0.3, Path(sys.argv[1])):
                await asyncio.gather(asyncio.create_task(episode(), name="episode 3"), asyncio.sleep(60))

        asyncio.run(main())
        """,
    )
    assert done.returncode == EXIT_HANG
    (line,) = [line for line in report.splitlines() if line.startswith("task episode 3: ")]
    innermost, outer, outermost = line.removeprefix("task episode 3: ").split(" < ")
    assert innermost.startswith("Event.wait (") and outer == "tool_of_the_user (<string>:6)"
    assert outermost == "episode (<string>:10)"


def test_a_thread_that_blocks_is_shown(tmp_path):
    done, report = _run(
        tmp_path,
        """
        def blocks_in_the_learner():
            time.sleep(60)

        with watchdog.Watchdog(0.3, Path(sys.argv[1])):
            blocks_in_the_learner()
        """,
    )
    assert done.returncode == EXIT_HANG and "blocks_in_the_learner" in report


def test_a_call_that_holds_the_interpreter_is_ended_too(tmp_path):
    done, _ = _run(
        tmp_path,
        """
        import ctypes
        watchdog.GRACE = 0.2
        with watchdog.Watchdog(0.5, Path(sys.argv[1])):
            time.sleep(0.2)
            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
        """,
    )
    assert done.returncode != 0 and "Timeout" in done.stderr


@pytest.mark.parametrize("disk", ["fine", "full", "hangs"])
def test_the_last_line_and_the_status_say_why(tmp_path, disk):
    """The report can't be written to a directory, and a status that hangs is not waited for."""
    if disk == "full":
        (tmp_path / "hang.txt").mkdir()
    code = f"""
        watchdog.WRITE_TIMEOUT = 0.3

        def fail(line):
            while {disk == "hangs"}:
                time.sleep(1)
            Path(sys.argv[1]).with_name("why").write_text(line)

        with watchdog.Watchdog(0.3, Path(sys.argv[1]), fail) as dog:
            dog.beat("save")
            time.sleep(60)
        """
    done = subprocess.run([sys.executable, "-c", PREAMBLE + textwrap.dedent(code), tmp_path / "hang.txt"], **OUTPUT)
    why = "nothing has moved for 0.3 s (recover.hang_timeout) since 'save'"
    assert done.returncode == EXIT_HANG
    assert done.stderr.splitlines()[-1] == f"error: {why} (the stacks above say where it waits)"
    if disk != "hangs":
        assert (tmp_path / "why").read_text() == why


@pytest.mark.parametrize(("error", "status"), [("None", 0), ("UserError('train_dataset.path: no such file')", 1)])
def test_what_does_not_close_ends_with_the_status_of_the_run(tmp_path, error, status):
    done, report = _run(
        tmp_path,
        f"""
        from rljax.errors import UserError
        watchdog.CLOSE_TIMEOUT = 0.2

        async def closes_never():
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass

        async def main(dog):
            dog.watch_tasks()
            task = asyncio.create_task(closes_never(), name="a part of the run")
            await asyncio.sleep(0)
            dog.closing({error})

        with watchdog.Watchdog(20, Path(sys.argv[1]), lambda line: print("failed:", line, file=sys.stderr)) as dog:
            asyncio.run(main(dog))
        """,
    )
    late = "what was left to close did not end in 0.2 s, and is abandoned"
    assert done.returncode == status
    assert "task a part of the run: Event.wait" in report
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: train_dataset.path: no such file; {late}" if status else f"warning: {late}")
    assert ("failed: train_dataset.path: no such file" in done.stderr) == bool(status)


def test_a_call_that_holds_the_interpreter_fails_the_run_in_its_status(tmp_path):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"state": "running", "step": 7}))
    done, _ = _run(
        tmp_path,
        """
        import ctypes
        watchdog.GRACE = 0.3
        def main():
            ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock
        with watchdog.Watchdog(0.3, Path(sys.argv[1]), status=Path(sys.argv[1]).with_name("status.json")) as dog:
            dog.beat("update")
            time.sleep(0.2)
            main()
        """,
    )
    told = json.loads(status.read_text())
    assert done.returncode == -signal.SIGABRT and "in main" in done.stderr
    assert (told["state"], told["step"]) == ("failed", 7)
    assert told["error"].startswith("nothing has moved for 0.6 s since 'update': a call holds the interpreter")
    assert f"error: {told['error']}" in done.stderr


def test_a_process_that_was_stopped_did_not_hang(tmp_path):
    """SIGSTOP for longer than the limit, as from a shell or a suspended machine, ends nothing."""
    code = """
        watchdog.GRACE = watchdog.STOPPED = 0.3
        with watchdog.Watchdog(0.6, Path(sys.argv[1]), status=Path(sys.argv[1]).with_name("status.json")) as dog:
            print("stop me", flush=True)
            for _ in range(40):
                time.sleep(0.05)
                dog.beat("group")
        """
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), tmp_path / "hang.txt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == 0


def test_a_run_that_moves_goes_on(tmp_path):
    with Watchdog(0.5, tmp_path / "hang.txt") as dog:
        for _ in range(20):
            time.sleep(0.05)
            dog.beat("group")
    assert not (tmp_path / "hang.txt").exists()
