"""A workflow whose tool never returns and that swallows its cancellation ends the run once, with the reason."""

import json
import subprocess
import sys
import textwrap

from rljax.process.watchdog import EXIT_HANG

RUN = """
import asyncio, dataclasses, sys
from pathlib import Path
from rljax import loop
from rljax.process.watchdog import Watchdog
from rljax.sinks.run_directory import RunDirectory
from rljax.testing import harness

class Waits(harness.Repeat):
    async def tool_of_the_user(self):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    async def episode(self, generator, prompt, params, seed):
        if prompt.uid == "0/3":
            await self.tool_of_the_user()
        return await super().episode(generator, prompt, params, seed)

workdir = Path(sys.argv[1])
directory = RunDirectory(workdir)
run = harness.make_run(workdir, {"recover.hang_timeout": 1.5}, workflow=Waits())
with Watchdog(1.5, workdir / "hang.txt", directory.fail) as watchdog:
    loop.train(dataclasses.replace(run, watchdog=watchdog))
"""


def test_it_ends_with_the_users_frame_the_status_and_one_last_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(RUN), tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_HANG, done.stderr
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "failed" and told["error"].startswith("nothing has moved for 1.5 s (recover.hang_timeout) since")
    assert done.stderr.splitlines()[-1].startswith(f"error: {told['error']}")
    assert "Waits.tool_of_the_user" in (tmp_path / "hang.txt").read_text()
