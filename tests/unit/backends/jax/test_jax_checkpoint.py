"""Checkpoints of trees: what is read is what was written, and what is broken is refused in one
line.
"""

import json
import shutil
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax import checkpoint
from rljax.checkpoints import integrity
from rljax.errors import UserError


def tree():
    rng = np.random.default_rng(0)
    return {
        "params": {
            "a": jnp.asarray(rng.normal(size=(300, 7)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        },
        "count": jnp.asarray(3, jnp.int32),
    }


@pytest.fixture
def saved(tmp_path):
    checkpoint.save_tree(tmp_path / "c", tree(), {"format": "test", "step": 3})
    return tmp_path / "c"


def test_what_is_read_is_what_was_written(saved):
    read = checkpoint.restore_tree(saved, jax.tree.map(jnp.zeros_like, tree()))
    jax.tree.map(np.testing.assert_array_equal, read, tree())
    assert integrity.read_meta(saved)["step"] == 3


def data_files(saved):
    return sorted((p for p in (saved / "tree").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_any_damaged_file_is_refused_by_name(saved, tmp_path, damage):
    for index, original in enumerate(data_files(saved)):
        copy = tmp_path / f"copy{index}"
        shutil.copytree(saved, copy)
        victim = copy / original.relative_to(saved)
        if damage == "flip":
            flip(victim)
        elif damage == "truncate":
            victim.write_bytes(victim.read_bytes()[:-1])
        else:
            victim.unlink()
        with pytest.raises(UserError, match=victim.name) as caught:
            checkpoint.restore_tree(copy, tree())
        assert "\n" not in str(caught.value)


def test_a_directory_that_holds_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no meta\.json"):
        checkpoint.restore_tree(tmp_path, tree())
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta\.json: not JSON"):
        checkpoint.restore_tree(tmp_path, tree())
    (tmp_path / "meta.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        checkpoint.restore_tree(tmp_path, tree())


def test_a_tree_that_orbax_cannot_parse_is_one_line(saved):
    """The checksums agree with the files, as they would with a checkpoint of a later format."""
    meta = json.loads((saved / "meta.json").read_text())
    for path in data_files(saved):
        path.write_bytes(b"garbage")
    meta["files"] = integrity.record(saved / "tree", integrity.files_below(saved / "tree"))
    (saved / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError) as caught:
        checkpoint.restore_tree(saved, tree())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["shape", "extra", "absent"])
def test_a_checkpoint_of_another_tree_is_refused_by_the_array(saved, change):
    like = tree()
    if change == "shape":
        like["params"]["a"] = jnp.zeros((300, 8))
    elif change == "extra":
        like["params"]["c"] = jnp.zeros(2)
    else:
        del like["params"]["a"]
    with pytest.raises(UserError, match=f"params/{'c' if change == 'extra' else 'a'}"):
        checkpoint.restore_tree(saved, like)


def test_a_full_disk_in_the_middle_of_a_save_is_one_line_and_the_last_checkpoint_still_loads(tmp_path):
    """The disk is full for real: the kernel refuses bytes beyond RLIMIT_FSIZE, in a process of its
    own.
    """
    code = """
        import resource, signal, sys
        from pathlib import Path
        import jax, numpy as np
        from rljax.backends.jax import checkpoint
        from rljax.errors import UserError
        root = Path(sys.argv[1])
        state = {"w": jax.random.normal(jax.random.key(0), (100_000,))}
        checkpoint.save_tree(root / "good", state, {})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        try:
            checkpoint.save_tree(root / "bad", state, {})
        except UserError as error:
            print(error)
        read = checkpoint.restore_tree(root / "good", state)
        assert np.array_equal(read["w"], state["w"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"checkpoint: could not write {tmp_path / 'bad'}: File too large"]
    assert "Traceback" not in done.stderr


def test_a_tree_larger_than_the_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """Tensorstore's threads each print a traceback when the disk fills up under them."""
    large = {"a": jnp.zeros((1000, 1000), jnp.float32)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3_999_999))
    with pytest.raises(UserError, match="No space left on device for 4 MB"):
        checkpoint.save_tree(tmp_path / "x", large, {})
    assert not (tmp_path / "x" / "tree").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=4_000_000))
    checkpoint.save_tree(tmp_path / "x", large, {})
