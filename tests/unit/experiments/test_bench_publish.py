"""The benchmark of publishing over a real SGLang server on the CPU, of a model that takes no time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.shared import REPOSITORY, sglang_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
