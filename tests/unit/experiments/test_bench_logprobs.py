"""The benchmark of the log-prob op at a size that a CPU does in a moment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--rows=32", "--hidden=16", "--vocabulary=200", "--chunk=8", "--repeats=1"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_it_checks_and_times_ours(backend, tmp_path):
    if backend == "torch":
        pytest.importorskip("torch", reason="the torch backend needs the extra [torch]")
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "experiments.bench.logprobs",
        f"--backend={backend}",
        "--only=ours",
        f"--json={out}",
        *SMALL,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["variant"]: row for row in json.loads(out.read_text())}
    assert {f"{backend} ours, fused (6MHV)", f"{backend} ours, recomputed (8MHV)"} <= rows.keys()
    for row in rows.values():
        assert "failed" not in row
        assert row["ms"] > 0
        # bfloat16 gradients: of about two roundings, 2^-9 each
        assert row["d_hidden_error"] < 2**-7 and row["d_unembedding_error"] < 2**-7
        assert row["logp_error"] is None or row["logp_error"] < 1e-5
        assert row["variant"] in done.stdout
