"""The Bazel workspace forgets no file; where Bazel is installed it builds, and an import that
points up does not.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rule import BARE

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("rljax", *BARE, "tests")


def python_folders() -> set[Path]:
    """With Python files in them, each once: not through the links inside rljax/."""
    links = {REPOSITORY / "rljax" / name for name in BARE}
    files = [file for folder in FOLDERS for file in (REPOSITORY / folder).rglob("*.py")]
    return {file.parent for file in files if not links & set(file.parents)}


def test_every_folder_with_python_has_a_build_file():
    assert [str(folder) for folder in python_folders() if not (folder / "BUILD").is_file()] == []


def test_the_files_of_every_folder_are_in_a_library():
    """Its own, or the one of a folder above, which names it."""
    texts = [(folder / "BUILD").read_text() for folder in python_folders()]
    named = "".join(text for text in texts if "library(" in text)
    for folder in python_folders():
        lines = (folder / "BUILD").read_text()
        if "\nsources(" in lines or "\nsuite(" in lines:
            place = folder.relative_to(REPOSITORY).as_posix()
            label = f"//rljax/{place}" if place.startswith(BARE) else f"//{place}"
            assert f'"{label}:sources"' in named, label
        else:
            assert 'srcs = glob(["*.py"]' in lines, folder
            for left_out in re.findall(r'exclude = \["(.+?)"\]', lines):
                assert f'"//{folder.relative_to(REPOSITORY)}:{left_out}"' in named, left_out


def test_every_binary_is_a_target():
    for folder in (REPOSITORY / "experiments", REPOSITORY / "experiments" / "bench"):
        build = (folder / "BUILD").read_text()
        for file in folder.glob("*.py"):
            assert is_program(file) == (f'"{file.stem}",' in build), file.name


def is_program(file: Path) -> bool:
    """Returns whether a file runs as a program here; the peer's half of a benchmark runs in the peer's environment."""
    statements = ast.parse(file.read_text()).body
    guards = [node for node in statements if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"]
    return bool(guards) and file.stem not in ("grpo_step_trl", "grpo_step_tunix", "decode_sglang")


def _not_of_the_tree(folder: str, names: list[str]) -> set[str]:
    """What runs and tools leave in a checkout."""
    mine = (".bazelrc", ".bazelignore", "runs", "models", "data")
    top = {name for name in names if name.startswith((".", "bazel-")) or name in mine[2:]} - set(mine[:2])
    return (top if Path(folder) == REPOSITORY else set()) | ({"__pycache__"} & set(names))


PLANTED = {  # file -> a line at its end, and why it does not build
    "rljax/seeding.py": ("import rljax.engines.jax.plugin", "rljax must not import rljax.engines.jax.plugin"),
    "engines/jax/rows.py": ("import rljax.engines.http.protocol", "its library does not depend on //rljax/engines/http"),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bazel") is None, reason="left out: Bazel is not installed (docs/bazel.md)")
def test_what_is_planted_does_not_build(tmp_path):
    """An upward import, and one of a library that is no dependency; the libraries alone, before
    anything is run.
    """
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    shutil.copytree(REPOSITORY, tree, symlinks=True, ignore=_not_of_the_tree)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def bazel(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bazel", f"--output_user_root={cache}", *arguments]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)

    try:
        built = bazel("build", "//...")
        assert built.returncode == 0, built.stderr
        for file, (line, reason) in PLANTED.items():
            sound = (tree / file).read_text()
            (tree / file).write_text(f"{sound}\n{line}\n")
            failed = bazel("build", f"//{'rljax/' if file.startswith(BARE) else ''}{Path(file).parent}")
            assert failed.returncode != 0 and reason in failed.stderr, failed.stderr
            (tree / file).write_text(sound)
    finally:
        bazel("shutdown")
        subprocess.run(["chmod", "-R", "u+w", str(cache)])  # its outputs are read-only, and pytest removes them
