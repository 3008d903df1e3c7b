"""The benchmark of publishing over a real SGLang server on the CPU, of a model that takes no time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.shared import REPOSITORY, sglang_python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_transport_is_timed_and_brings_the_weights(tmp_path):
    pytest.importorskip("torch", reason="the torch learner needs the extra [torch]")
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "experiments.bench.publish", f"--sglang_python={sglang_python()}", f"--json={out}"]
    command += ["--device=cpu", "--sizes=tiny", "--repeats=1", "--bucket_mb=1", "--server_args=--max-total-tokens,4096"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["transport"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == {"gloo", "ipc", "directory"}
    for row in rows.values():
        assert row["seconds"] > 0 and row["bytes"] > 0
        assert row["error"] < 0.05  # the server's weights are the learner's, in bfloat16; its own would be off by more


LEAVES = """
import asyncio, sys
from absl import flags
from rljax.experiments.bench import publish
from rljax import engine
from rljax.multiprocess import leader
from rljax.errors import SamplerError, UserError

class Learner:
    def export(self, target):
        if isinstance(target, engine.ExportToDirectory):
            target.directory.mkdir()
            return engine.WeightsInDirectory(target.directory)
        if sys.argv[1] == "refuse":
            raise UserError("no such route")
        return engine.WeightsInMemory({})

    def close(self):
        print("closed")

class Sampler:
    async def pause(self): pass
    async def resume(self): pass
    async def load_weights(self, source, version):
        if version == 1000 and not tried:
            tried.append(version)
            raise SamplerError("the server did not take them")

tried = []
flags.FLAGS(["publish", "--device=cpu", "--repeats=1"])
leader.make_learner = lambda *_: Learner()

async def same(*_):
    return 0.0

publish._difference = same  # neither samples nor scores
try:
    asyncio.run(publish._of_transport("gloo", "tiny", "sglang:d1+fsdp:d1", publish.Path("."), Sampler(), 1000))
except (UserError, RuntimeError) as error:
    print(error)
"""


@pytest.mark.parametrize(("trouble", "said"), [("refuse", "no such route"), ("fall back", "the publish fell back")])
def test_a_learner_whose_transport_is_left_out_is_closed(trouble, said):
    done = subprocess.run([sys.executable, "-c", LEAVES, trouble], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    closed, reason = done.stdout.splitlines()
    assert closed == "closed" and reason.startswith(said)
