"""A checkpoint is whole or not there; what is kept is what the policy says."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from rljax.checkpoints import integrity
from rljax.checkpoints.integrity import MANIFEST
from rljax.checkpoints.store import Checkpoints
from rljax.errors import UserError


def _write(text):
    def write(directory):
        (directory / "learner").mkdir()
        (directory / "learner" / "params").write_text(text)
        (directory / "loop.json").write_text("{}")

    return write


def _newest(checkpoints):
    return next(checkpoints.intact(), None)


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    assert _newest(Checkpoints(tmp_path / "none", 2)) is None


def test_the_newest_is_found_and_only_the_last_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (8, 9, 10, 11):
        checkpoints.save(step, _write(f"at {step}"))
    assert checkpoints.steps() == [10, 11]
    newest = _newest(checkpoints)
    assert newest.step == 11 and (newest.path / "learner" / "params").read_text() == "at 11"


def test_the_best_by_evaluation_is_kept_beside_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step, score in enumerate([0.1, 0.9, None, 0.3, 0.9, 0.2]):
        checkpoints.save(step, _write(""), score=score)
    assert checkpoints.steps() == [4, 5]  # of equal ones the newer


def test_every_file_and_directory_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """A power cut after the rename must not leave a checkpoint whose files are empty."""
    synced, fsync, rename = [], os.fsync, os.rename

    def watched_fsync(handle):
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def watched_rename(source, target):
        if str(target) == str(tmp_path / "3"):
            inside = {path.stat().st_ino for path in [source, *source.rglob("*")]}
            assert len(inside) == 5 and inside <= set(synced)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    Checkpoints(tmp_path, keep_last=2).save(3, _write("parameters"))
    assert tmp_path.stat().st_ino in synced  # after the rename: the name itself


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "no manifest", "garbled manifest"])
def test_a_corrupt_one_is_passed_over_with_a_warning(tmp_path, caplog, harm):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2):
        checkpoints.save(step, _write("parameters"))
    params, manifest = tmp_path / "2" / "learner" / "params", tmp_path / "2" / MANIFEST
    if harm == "cut":
        os.truncate(params, 3)
    elif harm == "flip":
        params.write_text("pArameters")
    elif harm == "gone":
        params.unlink()
    elif harm == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
    assert _newest(checkpoints).step == 1
    assert len(caplog.records) == 1 and "2 is not intact" in caplog.text


def test_every_byte_counts_whatever_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("rljax.checkpoints.integrity._CHUNK", 4)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    text = "0123456789abcdef"
    checkpoints.save(1, _write(text))
    params = tmp_path / "1" / "learner" / "params"
    assert _newest(checkpoints).step == 1
    for at in range(len(text)):
        params.write_text(text[:at] + "X" + text[at + 1 :])
        assert _newest(checkpoints) is None


def _write_arrays(directory):
    """Writes a directory as a learner does that records its own arrays."""
    (directory / "learner" / "tree").mkdir(parents=True)
    (directory / "learner" / "tree" / "a").write_text("arrays")
    integrity.write_meta(directory / "learner", {"format": "a test's"})
    (directory / "learner" / "more").write_text("beside the arrays")
    (directory / "loop.json").write_text("{}")


def _takes(checkpoint):
    """Returns whether a run would resume from it: the learner verifies its arrays."""
    try:
        integrity.verify(checkpoint.path / "learner")
    except UserError:
        return False
    return True


@pytest.mark.parametrize("files", [{"loop.json": 3}, {"loop.json": [1]}, {"loop.json": ["x", 1]}, [], 3, None])
def test_a_manifest_of_another_shape_is_corrupt(tmp_path, files):
    (tmp_path / MANIFEST).write_text(json.dumps({"step": 1, "score": None, "files": files}))
    with pytest.raises(integrity.Corrupt, match=r"manifest\.json can't be read"):
        integrity.read_manifest(tmp_path)


def test_every_file_is_recorded_once_and_any_harm_to_any_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, _write_arrays)
    manifest = json.loads((tmp_path / "1" / MANIFEST).read_text())["files"]
    recorded = integrity.read_meta(tmp_path / "1" / "learner")["files"]
    named = sorted([*manifest, *(f"learner/tree/{name}" for name in recorded)])
    there = sorted(p.relative_to(tmp_path / "1").as_posix() for p in (tmp_path / "1").rglob("*") if p.is_file())
    assert sorted([*named, MANIFEST]) == there
    assert _takes(_newest(checkpoints))
    for name in there:
        path = tmp_path / "1" / name
        content = path.read_bytes()
        for harmed in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(harmed)
            newest = _newest(checkpoints)
            assert newest is None or not _takes(newest), name
        path.write_bytes(content)
    assert _takes(_newest(checkpoints))


@pytest.mark.parametrize("harmed", ["learner/more", "learner/tree/a"])
@pytest.mark.parametrize("listed", ["manifest.json", "learner/meta.json"])
def test_a_list_that_leaves_files_out_is_found(tmp_path, listed, harmed):
    """A file that no list has is never compared, so that an empty list must not pass as intact."""
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, _write_arrays)
    path = tmp_path / "1" / listed
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    (tmp_path / "1" / harmed).write_text("changed")
    newest = _newest(checkpoints)
    assert newest is None or not _takes(newest)


def test_what_a_killed_rescore_left_does_no_harm(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, _write_arrays)
    (tmp_path / "1" / f".{MANIFEST}.part").write_text("{")
    assert _takes(_newest(checkpoints))


@pytest.mark.parametrize("name", ["2", "50", ".2.tmp", ".50.trash", "07", "\u00b2", "9-failed"])
@pytest.mark.parametrize("make", ["file", "broken link"])
def test_a_stray_file_is_no_checkpoint(tmp_path, name, make):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, _write("good"))
    stray = tmp_path / name
    stray.write_text("a note") if make == "file" else stray.symlink_to("nowhere")
    assert checkpoints.steps() == [1] and _newest(checkpoints).step == 1
    for step in (2, 3):
        checkpoints.save(step, _write("good"))
        assert checkpoints.steps() == [step]
    checkpoints.save(50, _write("bad"), failed=True)
    assert (tmp_path / "50-failed").is_dir() and _newest(checkpoints).step == 3


def test_no_byte_is_read_twice_to_save_or_to_check(tmp_path, monkeypatch):
    read, checksum = [], integrity._checksum

    def counting(path):
        read.append(path.name)
        return checksum(path)

    monkeypatch.setattr(integrity, "_checksum", counting)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    everything = ["a", "loop.json", "meta.json", "more"]
    checkpoints.save(1, _write_arrays)
    assert sorted(read) == everything
    read.clear()
    assert _takes(_newest(checkpoints))
    assert sorted(read) == everything


def test_a_learners_directory_can_be_verified_wherever_it_is_moved(tmp_path):
    Checkpoints(tmp_path / "run", keep_last=1).save(1, _write_arrays)
    moved = (tmp_path / "run" / "1" / "learner").rename(tmp_path / "moved")
    integrity.verify(moved)
    (moved / "tree" / "a").write_text("ARRAYS")
    with pytest.raises(UserError, match=r"moved/tree/a is corrupt"):
        integrity.verify(moved)


def test_saving_the_same_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for text in ("first", "second"):
        checkpoints.save(3, _write(text))
    assert (_newest(checkpoints).path / "learner" / "params").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_the_one_of_a_failed_run_is_kept_and_not_resumed_from(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, _write("good"))
    checkpoints.save(2, _write("bad"), failed=True)
    assert _newest(checkpoints).step == 1
    checkpoints.save(2, _write("good"))
    checkpoints.save(3, _write("good"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2-failed", "3"]


def test_a_fault_that_is_not_the_disks_is_raised_as_it_is_and_leaves_nothing(tmp_path):
    def write(directory):
        (directory / "half").write_text("half")
        raise RuntimeError("learner")

    with pytest.raises(RuntimeError, match="learner"):
        Checkpoints(tmp_path, 1).save(1, write)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_the_last_good_one_loads(tmp_path):
    """The kernel refuses to write: a limit on the size of a file stands for a full disk, which
    root can't make here.
    """
    code = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from rljax.checkpoints.store import Checkpoints
        from rljax.errors import UserError
        checkpoints = Checkpoints(Path(sys.argv[1]), 2)
        def write(size):
            return lambda directory: (directory / "params").write_bytes(bytes(size))
        checkpoints.save(1, write(1000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
        def wrapped(directory):
            try:
                write(100_000)(directory)
            except OSError as error:
                raise RuntimeError("a framework's own words") from error
        for fill in (write(100_000), wrapped):
            try:
                checkpoints.save(2, fill)
            except UserError as error:
                print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("checkpoints: cannot write step 2: File too large (") and "saver.keep_last" in line
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert _newest(Checkpoints(tmp_path, 2)).step == 1


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write step 1"):
        Checkpoints(tmp_path / "file" / "checkpoints", 1).save(1, _write(""))


@pytest.mark.parametrize("kill_at", range(12))
def test_a_kill_during_a_save_leaves_the_one_before(tmp_path, kill_at):
    """The process dies at every one of the save's system calls in turn."""
    code = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from rljax.checkpoints import store as module
        left = int(sys.argv[2])
        def dying(call):
            def wrapper(*args, **kwargs):
                global left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*args, **kwargs)
            return wrapper
        def write(directory):
            (directory / "a").write_text("new")
            (directory / "b").write_text("new")
        checkpoints = module.Checkpoints(Path(sys.argv[1]), 1)
        checkpoints.save(1, lambda directory: (directory / "a").write_text("old"))
        for name in ("rename", "fsync"):
            setattr(module.os, name, dying(getattr(os, name)))
        module.shutil.rmtree = dying(module.shutil.rmtree)
        Path.write_text = dying(Path.write_text)
        checkpoints.save(2, write)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(kill_at)], capture_output=True, text=True)
    assert done.returncode in (0, -9), done.stderr
    checkpoints = Checkpoints(tmp_path, 1)
    newest = _newest(checkpoints)
    assert newest.step == (2 if (tmp_path / "2").exists() else 1)
    manifest = json.loads((newest.path / MANIFEST).read_text())
    assert set(manifest["files"]) == ({"a"} if newest.step == 1 else {"a", "b"})
    checkpoints.save(3, _write("after"))  # what was left lying about is cleared away
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
