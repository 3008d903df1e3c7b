"""A run that hangs is ended with an account; one that moves is left alone."""

import subprocess
import sys
import textwrap
import time

from rljax.process.watchdog import EXIT_HANG, Watchdog


def _run(tmp_path, body):
    code = "import asyncio, sys, time\nfrom pathlib import Path\nfrom rljax.process import watchdog\n" + textwrap.dedent(body)
    report = tmp_path / "hang.txt"
    done = subprocess.run([sys.executable, "-c", code, str(report)], capture_output=True, text=True, timeout=60)
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


def test_a_run_that_moves_goes_on(tmp_path):
    with Watchdog(0.5, tmp_path / "hang.txt") as dog:
        for _ in range(20):
            time.sleep(0.05)
            dog.beat("group")
    assert not (tmp_path / "hang.txt").exists()
