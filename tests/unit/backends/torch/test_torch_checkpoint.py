"""Checkpoints of named tensors: round trips, and one line for what is broken."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from rljax.backends.torch import checkpoint
from rljax.checkpoints import integrity
from rljax.config.allocation import Pool
from rljax.engines.cuda.learning import distributed as world
from rljax.errors import UserError
from rljax.process.signals import Stopped


def _recorded(tree):
    return integrity.record(tree, integrity.files_below(tree))


@pytest.fixture(scope="module")
def rank_mesh():
    return world.join(Pool("fsdp"))


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "policy/a": torch.randn(300, 7, generator=generator),
        "policy/b": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
    }


@pytest.fixture
def saved(tmp_path, rank_mesh):
    written = tensors()
    checkpoint.save(tmp_path / "c", written, {"format": "test", "step": 3}, rank_mesh)
    return tmp_path / "c", written


def test_what_is_read_is_what_was_written(saved, rank_mesh):
    directory, written = saved
    read = checkpoint.empty_like(written)
    checkpoint.restore(directory, read, rank_mesh)
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    assert checkpoint.meta_of(directory, rank_mesh)["step"] == 3


@pytest.mark.parametrize("keep_memory", [False, True])
def test_each_save_beside_other_calls_is_of_its_own_moment(tmp_path, rank_mesh, keep_memory):
    saves = checkpoint.Saves(rank_mesh, world.cpu_group(60), keep_memory=keep_memory)
    changing, at, places = tensors(), [], []
    stage = saves._stage

    def staged(given):
        made = stage(given)
        places.append({name: tensor.data_ptr() for name, tensor in made.items()})
        return made

    saves._stage = staged
    for i in range(3):
        at.append({name: tensor.clone() for name, tensor in changing.items()})
        write = saves.begin(tmp_path / str(i), lambda: changing, 10_000, {"format": "test", "step": i})
        write.copied.result(60)
        for tensor in changing.values():
            tensor.add_(1)
        write.written.result(60)
    for i, expected in enumerate(at):
        read = checkpoint.empty_like(expected)
        checkpoint.restore(tmp_path / str(i), read, rank_mesh)
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    if keep_memory:
        assert places[0] == places[1] == places[2]
    saves.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap"])
def test_a_damaged_file_is_named(saved, rank_mesh, damage):
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
        checkpoint.restore(directory, checkpoint.empty_like(written), rank_mesh)
    assert "\n" not in str(caught.value)


class RunsCommand:
    """Runs a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _harmful(metadata, command):
    entry = next(iter(metadata.state_dict_metadata))
    place = next(iter(metadata.storage_data))
    elsewhere = dataclasses.replace(metadata.storage_data[place], relative_path="../../elsewhere")
    return {
        "alone": RunsCommand(command),
        "inside": dataclasses.replace(metadata, planner_data=RunsCommand(command)),
        "as bytes": dataclasses.replace(
            metadata, state_dict_metadata=metadata.state_dict_metadata | {entry: BytesStorageMetadata()}
        ),
        "elsewhere": dataclasses.replace(metadata, storage_data=metadata.storage_data | {place: elsewhere}),
    }


@pytest.mark.parametrize("harm", ["alone", "inside", "as bytes", "elsewhere"])
def test_nothing_of_a_checkpoint_is_run(saved, rank_mesh, tmp_path, harm):
    """Checksums are right: whoever writes a checkpoint writes them too."""
    directory, written = saved
    file = directory / "tree" / ".metadata"
    harmful = _harmful(pickle.loads(file.read_bytes()), f"touch {tmp_path / 'ran'}")[harm]
    file.write_bytes(pickle.dumps(harmful))
    meta = integrity.read_meta(directory) | {"files": _recorded(directory / "tree")}
    (directory / "meta.json").write_text(json.dumps(meta))
    reads = [
        lambda: checkpoint.restore(directory, checkpoint.empty_like(written), rank_mesh),
        lambda: checkpoint.read_host(directory, written),
        lambda: checkpoint.stored_names(directory),
    ]
    for read in reads:
        with pytest.raises(UserError, match=r"can't be restored: \.metadata") as caught:
            read()
        assert "\n" not in str(caught.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", ["shape", "extra", "missing"])
def test_another_runs_tensors_are_refused_by_name(saved, rank_mesh, change):
    directory, written = saved
    if change == "shape":
        written["policy/a"] = torch.zeros(300, 8)
    elif change == "extra":
        written["policy/c"] = torch.zeros(2)
    else:
        del written["policy/a"]
    with pytest.raises(UserError, match=f"policy/{'c' if change == 'extra' else 'a'}"):
        checkpoint.restore(directory, written, rank_mesh)


def test_a_full_disk_in_the_middle_of_a_save_is_one_line_and_the_last_checkpoint_still_loads(tmp_path):
    """The kernel refuses bytes beyond RLIMIT_FSIZE, in a process of its own."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from rljax.config.allocation import Pool
        from rljax.backends.torch import checkpoint
        from rljax.engines.cuda.learning import distributed as world
        from rljax.errors import UserError
        root, rank_mesh = Path(sys.argv[1]), world.join(Pool("fsdp"))
        state = {"w": torch.randn(100_000)}
        checkpoint.save(root / "good", state, {}, rank_mesh)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        try:
            checkpoint.save(root / "bad", state, {}, rank_mesh)
        except UserError as error:
            print(error)
        read = checkpoint.empty_like(state)
        checkpoint.restore(root / "good", read, rank_mesh)
        assert torch.equal(read["w"], state["w"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"checkpoint: could not write {tmp_path / 'bad'}:")
    assert "Traceback" not in done.stderr, done.stderr


_signal_at: list[str] = []  # ends of names; a signal comes when such a file is opened


def _signaled(event, arguments):
    if event == "open" and any(str(arguments[0]).endswith(name) for name in _signal_at):
        _signal_at.clear()
        os.kill(os.getpid(), signal.SIGTERM)


def _stop(number, frame):
    raise Stopped(number)


@pytest.mark.parametrize("action", ["save", "restore", "read_host"])
def test_a_signal_ends_a_save_and_a_restore_as_that_signal_and_blames_no_disk(saved, rank_mesh, tmp_path, action):
    directory, written = saved
    actions = {
        "save": lambda: checkpoint.save(tmp_path / "d", written, {}, rank_mesh),
        "restore": lambda: checkpoint.restore(directory, checkpoint.empty_like(written), rank_mesh),
        "read_host": lambda: checkpoint.read_host(directory, written),
    }
    sys.addaudithook(_signaled)  # the only way to an instant within torch's own code
    before = signal.signal(signal.SIGTERM, _stop)
    _signal_at.append(".distcp")
    try:
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM$") as stopped:
            actions[action]()
    finally:
        signal.signal(signal.SIGTERM, before)
        _signal_at.clear()
    assert stopped.value.number == signal.SIGTERM
    actions["restore"]()
