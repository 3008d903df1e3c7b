"""The context of a run: everything that may explain why two runs with one config differ.

WORKDIR/context.json is {"sessions": [...]} with one `Session` per process that worked on the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rljax
from rljax import json_fields
from rljax.config import digests
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.evaluation.protocol import Protocol
from rljax.sinks.run_directory import RunDirectory, dump

FILE = "context.json"
PACKAGES = (
    *("numpy", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "optax", "orbax-checkpoint"),
    *("torch", "transformers", "tokenizers", "safetensors", "peft", "sglang", "grain", "ml-collections", "absl-py"),
    *("math-verify", "reasoning-gym", "wandb", "tensorboard"),
)
_ENDS = 1 << 20  # bytes of each end of a model's file that its digest reads


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The machine of a session."""

    platform: str  # system, release and architecture
    cpu: str  # the model's name
    cores: int  # that this process may use
    memory_bytes: int | None  # of the machine
    devices: Sequence[str]  # names that the engines have for them; none on a machine without accelerators, or unknown


@dataclasses.dataclass(frozen=True)
class Session:
    """One process's work on a run."""

    first_step: int  # finished steps when it began
    config: str  # digest of config.json
    seed: int
    rljax: str  # version
    commit: str | None  # of the checkout that rljax was imported from; None if it is installed
    dirty: bool | None  # True if that checkout had changes that are not committed
    packages: Mapping[str, str]  # versions of those of PACKAGES that are installed, and of python
    hardware: Hardware
    model: str  # digest of the model directory
    data: Mapping[str, object]  # identity of the training prompts: digest, number, order
    evaluation: Protocol | None  # on valid_dataset; None if the run has no evaluations
    evaluations: Mapping[str, Protocol]  # on the sets of valid_datasets, by name
    functions: Mapping[str, str]  # digests of the user's own that the config names (config/digests.py)


def session(
    config: Config,
    *,
    first_step: int,
    model_dir: Path,
    data: Mapping[str, object],
    protocols: Mapping[str, Protocol],
    devices: Sequence[str],
) -> Session:
    """Describes a session that begins now.

    Args:
      data: identity of the training prompts.
      protocols: protocols of the evaluations by the name of the set, "" for valid_dataset; empty
        without any.
      devices: names of the devices, as the engines know them.
    """
    commit, dirty = _checkout()
    return Session(
        first_step=first_step,
        config=_digest(config_io.to_json(config).encode()),
        seed=config.seed,
        rljax=rljax.__version__,
        commit=commit,
        dirty=dirty,
        packages={"python": platform.python_version()} | _installed(),
        hardware=Hardware(platform.platform(), _cpu(), _cores(), _memory(), tuple(devices)),
        model=model_digest(model_dir),
        data=data,
        evaluation=protocols.get(""),
        evaluations={name: protocol for name, protocol in protocols.items() if name},
        functions=digests.digests_of(config),
    )


def read(workdir: Path) -> list[Any]:
    """Returns the sessions of a run before this one.

    Raises UserError if context.json is not a context.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        sessions = json_fields.read_object(path, {"sessions": json_fields.listed(json_fields.OBJECT)}, needed=("sessions",))
    except UserError as error:
        raise UserError(f"--workdir: {error} (delete it to go on)") from None
    return list(sessions["sessions"])


def append(run: RunDirectory, this: Session) -> None:
    """Appends a session to context.json.

    Raises UserError as `read` does, or if the disk can't be written.
    """
    run.write_text(FILE, dump({"sessions": [*read(run.path), dataclasses.asdict(this)]}) + "\n")


def model_digest(directory: Path) -> str:
    """Hashes a model directory: names and sizes of its files, and a megabyte of each end of each.

    So a change of weights is found without reading gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in directory.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _checkout() -> tuple[str | None, bool | None]:
    """Returns the commit of rljax's checkout, and whether it has changes; (None, None) without one."""
    root = Path(rljax.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None, None
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
