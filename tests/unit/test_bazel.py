"""The Bazel workspace forgets no file; where Bazel is installed it builds, and an upward import does not."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rule import BARE

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("rljax", *BARE, "experiments", "tests")


def python_folders() -> set[Path]:
    """With Python files in them, each once: not through the links inside rljax/."""
    links = {REPOSITORY / "rljax" / name for name in BARE}
    files = [file for folder in FOLDERS for file in (REPOSITORY / folder).rglob("*.py")]
    return {file.parent for file in files if not links & set(file.parents)}


def test_every_folder_with_python_has_a_build_file():
    assert [str(folder) for folder in python_folders() if not (folder / "BUILD").is_file()] == []


def test_the_files_of_every_folder_are_in_the_library_above():
    """A folder whose BUILD file only lists its files is named by a library."""
    named = "".join(
        (REPOSITORY / file).read_text() for file in ("rljax/BUILD", "configs/BUILD", "experiments/BUILD", "tests/BUILD")
    )
    for folder in python_folders():
        lines = (folder / "BUILD").read_text()
        if "\nsources(" in lines or "\nsuite(" in lines:
            place = folder.relative_to(REPOSITORY).as_posix()
            label = f"//rljax/{place}" if place.startswith(BARE) else f"//{place}"
            assert f'"{label}:sources"' in named, label


def test_every_binary_is_a_target():
    for folder in (REPOSITORY / "experiments", REPOSITORY / "experiments" / "bench"):
        build = (folder / "BUILD").read_text()
        for file in folder.glob("*.py"):
            assert _is_run(file) == (f'"{file.stem}",' in build), file.name


def _is_run(file: Path) -> bool:
    """As a program. The peer's half of a benchmark is one in the peer's environment alone."""
    statements = ast.parse(file.read_text()).body
    guards = [node for node in statements if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"]
    return bool(guards) and file.stem != "grpo_step_trl"


def _not_of_the_tree(folder: str, names: list[str]) -> set[str]:
    """What runs and tools leave in a checkout."""
    mine = (".bazelrc", ".bazelignore", "runs", "models", "data")
    top = {name for name in names if name.startswith((".", "bazel-")) or name in mine[2:]} - set(mine[:2])
    return (top if Path(folder) == REPOSITORY else set()) | ({"__pycache__"} & set(names))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bazel") is None, reason="Bazel is not installed (docs/bazel.md)")
def test_an_upward_import_does_not_build(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY, tree, symlinks=True, ignore=_not_of_the_tree)
    build = ["bazel", f"--output_user_root={tmp_path / 'cache'}", "build", "//..."]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    try:
        assert subprocess.run(build, cwd=tree, env=environment, capture_output=True).returncode == 0
        with (tree / "rljax" / "seeding.py").open("a") as file:
            file.write("\nimport rljax.engines.jax.sampler\n")
        failed = subprocess.run(build, cwd=tree, env=environment, capture_output=True, text=True)
        assert failed.returncode != 0 and "rljax must not import rljax.engines.jax.sampler" in failed.stderr
    finally:
        subprocess.run([*build[:2], "shutdown"], cwd=tree, env=environment, capture_output=True)
        subprocess.run(["chmod", "-R", "u+w", str(tmp_path / "cache")])
