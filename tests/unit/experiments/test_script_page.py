"""docs/script.md as its reader does it: a server, the page's script stopped at a breakpoint, its batch trained on twice."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "script.md"


def page_script():
    return re.search(r"^<!-- script -->\n```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]


def test_the_script_of_the_page_has_few_lines_and_compiles():
    script = page_script()
    compile(script, str(PAGE), "exec")
    assert len([line for line in script.splitlines() if line.strip()]) <= 27


class Terminal:
    """A process whose terminal is ours: what it prints, and what is typed there."""

    def __init__(self, command):
        self.ours, theirs = pty.openpty()
        here = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # a script's own folder is on its path, not the current one
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs, env=here)
        os.close(theirs)
        self.text = ""

    def until(self, words, seconds=120.0):
        """Reads on until these words come, and returns what came before them."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.ours], [], [], 1.0)[0]:
                try:
                    self.text += os.read(self.ours, 1 << 16).decode()
                except OSError:  # its end
                    raise AssertionError(f"{words!r} did not come:\n{self.text}") from None
        before, _, self.text = self.text.partition(words)
        return before

    def type(self, line):
        os.write(self.ours, f"{line}\n".encode())


def run(binary, *flags):
    command = [sys.executable, "-m", f"experiments.{binary}", "--config=configs/quickstart.py", *flags]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_from_the_server_to_the_same_loss_twice(tmp_path):
    serve = [sys.executable, "-m", "experiments.serve", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'served'}"]
    server = subprocess.Popen(serve, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[-1]
        script = page_script().replace("127.0.0.1:30000", address).replace("runs/", f"{tmp_path}/")
        stopping = script.replace(
            "        completion = ", "        if prompt.uid == FIRST:\n            breakpoint()\n        completion = "
        )
        assert stopping != script
        first = "import sys\n\nFIRST = sys.argv[1]\n"
        (tmp_path / "script.py").write_text(first + stopping)

        started = Terminal([sys.executable, str(tmp_path / "script.py"), "none"])
        printed = [started.until("]") for _ in range(3)]
        assert started.process.wait(60) == 0
        uid = re.search(r"(\d+/\d+) \[", printed[0])[1]

        terminal = Terminal([sys.executable, str(tmp_path / "script.py"), uid])
        for _ in range(8):  # one for each episode of the group
            terminal.until("(Pdb) ")
            terminal.type("p prompt.uid, len(prompt_ids)")
            assert terminal.until("(Pdb) ").strip().splitlines()[-1] == f"('{uid}', 6)"
            terminal.type("c")
        terminal.until("]")
        assert terminal.process.wait(120) == 0

        quitting = Terminal([sys.executable, str(tmp_path / "script.py"), uid])
        quitting.until("(Pdb) ")
        quitting.type("q")
        quitting.until("BdbQuit")
        assert quitting.process.wait(60) == 1
    finally:
        server.kill()
        server.communicate()
    losses = []
    for name in ("one", "two"):
        run("replay", "--config.total_train_steps=1", f"--batch={tmp_path / 'batch'}", f"--workdir={tmp_path / name}")
        (step,) = (json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append({key: value for key, value in step.items() if not key.startswith(("timeperf", "perf", "time"))})
    assert losses[0] == losses[1] and losses[0]["ppo_actor/update/loss"] != 0
