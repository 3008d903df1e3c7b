"""Where tests find what is no part of the repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared(name: str) -> Path:
    """A file or directory of RLJAX_SHARED, or of `shared` beside the repository; skips the test where there is none."""
    folder = Path(os.environ.get("RLJAX_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / name).exists():
        pytest.skip(f"left out: needs {name} in {folder} (RLJAX_SHARED names another directory)")
    return folder / name


def sglang_python() -> str:
    """An interpreter with SGLang for the CPU: RLJAX_SGLANG_PYTHON, this one, or one installed now (2 minutes, 3.2 GB)."""
    if given := os.environ.get("RLJAX_SGLANG_PYTHON"):
        return given
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    python = REPOSITORY / ".venv-sglang" / "bin" / "python"
    done = python.parent.parent / "installed"
    if not done.exists():
        script = shared("sglang_cpu/install.sh")
        subprocess.run(["bash", str(script), str(python.parent.parent)], check=True)
        done.touch()
    return str(python)
