"""The whole experiment of the GPU machine, with the fake engine in SGLang's place: what fails is
said, and the rest is done.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.shared import REPOSITORY

STEPS = 3


def test_a_run_that_fails_leaves_the_others_their_table_and_curves(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "experiments.bench.gpu_run", f"--out={out}", f"--scratch={tmp_path / 'scratch'}"]
    command += ["--device=cpu", "--modes=nosuch:d1,fake", f"--steps={STEPS}", "--set=warmup.steps=0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "no engine named 'nosuch'" in done.stdout  # the end of its log
    rows = [json.loads(line) for line in (out / "fake.metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    header, failed, ran = (out / "table.txt").read_text().splitlines()
    assert failed.split(maxsplit=1) == ["nosuchd1", "no step was finished"]
    shown = dict(zip(("run", "steps", "first", "last", "lag"), ran.split(), strict=False))
    assert shown["run"] == "fake" and int(shown["steps"]) == STEPS and header.split()[:2] == ["run", "steps"]
    assert float(shown["first"]) == round(rows[0]["rollout/reward/avg"], 3)
    assert float(shown["last"]) == round(rows[-1]["rollout/reward/avg"], 3)
    assert int(shown["lag"]) == max(row["rollout/staleness/max"] for row in rows)
    assert (out / "curves.png").stat().st_size > 0


def test_pieces_of_a_file_are_put_together_and_a_bundle_gets_an_interpreter_of_its_own(tmp_path):
    """A file that is no model is refused by the converter, once whole; the small model takes its
    place.
    """
    pieces = [tmp_path / "model.gguf.0", tmp_path / "model.gguf.1"]
    for index, piece in enumerate(pieces):
        piece.write_bytes(b"GG" if index == 0 else b"UF and nothing behind it")
    site = tmp_path / "site"
    info = site / "sglang-0.5.17.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    scratch = tmp_path / "scratch"
    command = [sys.executable, "-m", "experiments.bench.gpu_run", f"--out={tmp_path / 'out'}", f"--scratch={scratch}"]
    command += [f"--sglang_site={site}", f"--site_python={sys.executable}", f"--gguf={','.join(map(str, pieces))}"]
    command += ["--device=cpu", "--modes=fake", "--steps=1", "--set=warmup.steps=0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert (scratch / "whole.gguf").read_bytes() == b"".join(piece.read_bytes() for piece in pieces)
    question = "import importlib.metadata as m; print(m.version('sglang'))"
    assert subprocess.run([scratch / "sglang-python", "-c", question], capture_output=True, text=True).stdout == "0.5.17\n"
    assert (tmp_path / "out" / "fake.metrics.jsonl").exists()
