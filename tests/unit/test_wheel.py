"""The wheel holds one package, with the folders that the links stand for as real files, and the entry points."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, links kept as links, without the network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / name, source / name)
    for name in ("rljax", "backends", "engines", "configs", "experiments", "tests"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_wheel_holds_only_rljax(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rljax"}


@pytest.mark.slow
def test_wheel_holds_every_module_as_a_file(wheel):
    expected = {f"rljax/{file.relative_to(REPOSITORY / 'rljax')}" for file in (REPOSITORY / "rljax").rglob("*.py")}
    for folder in ("backends", "engines", "configs"):
        expected |= {f"rljax/{file.relative_to(REPOSITORY)}" for file in (REPOSITORY / folder).rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == expected
    links = [info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000]
    assert links == []


@pytest.mark.slow
def test_wheel_registers_the_engines(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entry_points = wheel.read(name).decode()
    assert "[rljax.engines]" in entry_points and "jax = rljax.engines.jax.plugin:PLUGIN" in entry_points
