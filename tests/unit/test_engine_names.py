"""No condition of the core names an engine: what engines do differently is said by their plugin."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.import_rule import BARE

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["rljax.engines"].keys()


def conditions(source: str) -> list[int]:
    """Returns the lines of comparisons and of cases with the name of an engine of ours."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare | ast.MatchValue)]
    return [
        node.lineno for node in nodes for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value in ENGINES
    ]


def test_no_condition_of_the_core_names_an_engine():
    links = {REPOSITORY / "rljax" / name for name in BARE}
    files = [file for file in (REPOSITORY / "rljax").rglob("*.py") if not links & set(file.parents)]
    assert len(files) > 200
    assert [f"{file}:{line}" for file in files for line in conditions(file.read_text())] == []


@pytest.mark.parametrize(
    "planted",
    [
        'if pool.engine == "jax":\n    pass',
        'x = "a" if engine != "fsdp" else "b"',
        'match engine:\n    case "sglang":\n        pass',
        'if engine in ("fake", "mine"):\n    pass',
    ],
)
def test_a_condition_that_does_is_found(planted):
    assert conditions(planted)


def test_a_default_and_another_word_are_no_condition():
    assert not conditions('engine = "fsdp"\nif device == "gpu":\n    run(engine="jax")\n')
