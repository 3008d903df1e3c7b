"""Docstrings begin with a verb or a noun that a reader can picture, and keep to 100 columns."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("rljax", "backends", "engines", "configs", "experiments")
COLUMNS = 100
BANNED = {
    *("What", "Of", "Whether", "Where", "How", "Every", "As", "In", "From", "Which", "For", "At", "Its", "With", "Until"),
    *("On", "To", "Who", "None", "Those", "Over", "So", "Against", "Before", "Without", "That", "It", "Within", "By"),
    *("Under", "After", "Not", "When", "Between", "Is", "Are", "Behind"),
}


def python_files(folder: Path) -> list[Path]:
    """Files of a folder, without those behind the links `rljax/engines`, `rljax/backends`, ..."""
    return sorted(Path(base) / name for base, _, names in os.walk(folder) for name in names if name.endswith(".py"))


def docstrings(source: str) -> Iterator[ast.Constant]:
    """Yields the docstrings of a module and of its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first.value


def faults_of(source: str) -> list[tuple[int, str]]:
    """Returns the faults of a module's docstrings as (line, fault)."""
    lines, found = source.splitlines(), []
    for docstring in docstrings(source):
        text = docstring.value.split()
        word = text[0].rstrip(".,:;") if text else ""
        if word in BANNED:
            found.append((docstring.lineno, f"begins with {word}"))
        for number in range(docstring.lineno, docstring.end_lineno + 1):
            if (columns := len(lines[number - 1].removesuffix('"""'))) > COLUMNS:  # the text's, not its end mark's
                found.append((number, f"{columns} columns"))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_have_a_first_word_that_says_something_and_short_lines(folder):
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {fault}"
        for path in python_files(REPOSITORY / folder)
        for line, fault in faults_of(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_each_file_is_read_once():
    files = [path.resolve() for folder in FOLDERS for path in python_files(REPOSITORY / folder)]
    assert len(files) == len(set(files))
    for once in ("rljax/loop.py", "engines/jax/learning/learner.py", "backends/torch/losses.py", "experiments/train.py"):
        assert REPOSITORY / once in files


@pytest.mark.parametrize(
    "begin", ["", "class A:\n    ", "def f():\n    ", "async def f():\n    ", "class A:\n    def f():\n        "]
)
def test_a_docstring_anywhere_is_found(begin):
    indent = begin.rpartition("\n")[2]
    line = begin.count("\n") + 1
    assert faults_of(f'{begin}"""Returns x.\n\n{indent}Details.\n{indent}"""\n') == []
    assert faults_of(f'{begin}"""Whether x."""\n') == [(line, "begins with Whether")]
    assert faults_of(f'{begin}"""\n{indent}Of: x\n{indent}"""\n') == [(line, "begins with Of")]
    fits = "x" * (COLUMNS - len(indent))
    assert faults_of(f'{begin}"""Returns x.\n\n{indent}{fits}\n{indent}"""\n') == []
    assert faults_of(f'{begin}"""Returns x.\n\n{indent}{fits}x\n{indent}"""\n') == [(line + 2, f"{COLUMNS + 1} columns")]


def test_other_strings_and_comments_are_not_docstrings():
    assert faults_of(f'x = """What {"x" * COLUMNS}"""\n# What {"x" * COLUMNS}\n') == []
