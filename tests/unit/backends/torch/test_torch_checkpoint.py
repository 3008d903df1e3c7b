"""Checkpoints of named tensors: what is read is what was written, and what is broken is refused in
one line.
"""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from rljax.backends.torch import checkpoint
from rljax.checkpoints import integrity
from rljax.config.allocation import Pool
from rljax.engines.cuda import distributed as world
from rljax.errors import UserError


def _recorded(tree):
    return integrity.record(tree, integrity.files_below(tree))


@pytest.fixture(scope="module")
def layout():
    return world.join(Pool("fsdp"))


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "policy/a": torch.randn(300, 7, generator=generator),
        "policy/b": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
    }


@pytest.fixture
def saved(tmp_path, layout):
    written = tensors()
    checkpoint.save(tmp_path / "c", written, {"format": "test", "step": 3}, layout)
    return tmp_path / "c", written


def test_what_is_read_is_what_was_written(saved, layout):
    directory, written = saved
    read = checkpoint.empty_like(written)
    checkpoint.restore(directory, read, layout)
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    assert checkpoint.meta_of(directory, layout)["step"] == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap"])
def test_a_damaged_file_is_named(saved, layout, damage):
    directory, written = saved
    file = max((p for p in (directory / "tree").iterdir()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    else:  # checksums that fit what can't be read
        file.write_bytes(b"garbage")
        meta = integrity.read_meta(directory) | {"files": _recorded(directory / "tree")}
        (directory / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="restored" if damage == "swap" else file.name) as caught:
        checkpoint.restore(directory, checkpoint.empty_like(written), layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["shape", "extra", "missing"])
def test_another_runs_tensors_are_refused_by_name(saved, layout, change):
    directory, written = saved
    if change == "shape":
        written["policy/a"] = torch.zeros(300, 8)
    elif change == "extra":
        written["policy/c"] = torch.zeros(2)
    else:
        del written["policy/a"]
    with pytest.raises(UserError, match=f"policy/{'c' if change == 'extra' else 'a'}"):
        checkpoint.restore(directory, written, layout)


def test_a_full_disk_in_the_middle_of_a_save_is_one_line_and_the_last_checkpoint_still_loads(tmp_path):
    """The kernel refuses bytes beyond RLIMIT_FSIZE, in a process of its own."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from rljax.config.allocation import Pool
        from rljax.backends.torch import checkpoint
        from rljax.engines.cuda import distributed as world
        from rljax.errors import UserError
        root, layout = Path(sys.argv[1]), world.join(Pool("fsdp"))
        state = {"w": torch.randn(100_000)}
        checkpoint.save(root / "good", state, {}, layout)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        try:
            checkpoint.save(root / "bad", state, {}, layout)
        except UserError as error:
            print(error)
        read = checkpoint.empty_like(state)
        checkpoint.restore(root / "good", read, layout)
        assert torch.equal(read["w"], state["w"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"checkpoint: could not write {tmp_path / 'bad'}:")
    assert "Traceback" not in done.stderr, done.stderr
