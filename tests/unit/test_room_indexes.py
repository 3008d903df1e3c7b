"""Indexes of rooms: who opens a folder finds a line about each of its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.import_rule import BARE, ROOMS

REPOSITORY = Path(__file__).resolve().parents[2]
LEAST = 5  # modules in a folder that has to have an index
ELSEWHERE = ("rljax",)  # README.md has it


def rooms() -> list[Path]:
    """Folders with at least LEAST modules, once each: not through the links inside rljax/."""
    links = {REPOSITORY / "rljax" / name for name in BARE}
    files = [file for top in ("rljax", "backends", "engines") for file in (REPOSITORY / top).rglob("__init__.py")]
    found = {file.parent for file in files if not links & set(file.parents) and len(modules(file.parent)) >= LEAST}
    return sorted(found - {REPOSITORY / name for name in ELSEWHERE})


def modules(room: Path) -> set[str]:
    return {file.name for file in room.glob("*.py") if not file.name.startswith("__")}


def named(source: str) -> set[str]:
    """Returns the files that a package's docstring names, without those of other folders."""
    return set(re.findall(r"(?<![/\w])\w+\.py\b", ast.get_docstring(ast.parse(source)) or ""))


def imported(source: str) -> set[str]:
    """Returns the files that a package imports by name, as the table of all rules does."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return {f"{alias.name}.py" for node in imports for alias in node.names}


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(REPOSITORY)))
def test_an_index_names_each_file_of_its_room_and_none_that_is_gone(room):
    source = (room / "__init__.py").read_text()
    assert sorted(modules(room) - named(source) - imported(source)) == []
    assert sorted(named(source) - modules(room)) == []


def test_the_readme_names_every_room():
    page = (REPOSITORY / "README.md").read_text()
    found = [room for room in ROOMS if (REPOSITORY / "rljax" / room).is_dir() and f"`rljax/{room}/`" not in page]
    assert found == []


def test_a_file_of_another_room_is_not_one_of_this():
    source = '"""Rooms.\n\na.py  one; b.py, another (rljax/other/c.py)\n"""\nfrom rljax.x import d\n'
    assert named(source) == {"a.py", "b.py"} and imported(source) == {"d.py"}
