"""Imports point one way: experiments -> testing -> engines -> backends -> rljax, from room to room
of rljax as the rule's table says, and what is optional is imported when it is used.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.import_rule import BARE, LAYERS, ROOMS, imports_of, undeclared, violations

REPOSITORY = Path(__file__).resolve().parents[2]


def sources() -> list[Path]:
    """Python files of the repository, each once: not through the links inside rljax/."""
    folders = (*(layer for layer in LAYERS if layer != "testing"), "configs")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    links = [REPOSITORY / "rljax" / name for name in BARE]
    return [file for file in files if not any(file.is_relative_to(link) for link in links)]


def test_imports_point_one_way():
    found = []
    for file in sources():
        found += violations(str(file.relative_to(REPOSITORY)), file.read_text())
    assert not found, "\n".join(found)


def test_rooms_have_an_order():
    """No circle: a room imports those that stand before it in the table."""
    order = list(ROOMS)
    assert [(room, below) for room in order for below in ROOMS[room] if order.index(below) >= order.index(room)] == []


def test_every_arrow_of_the_table_is_there():
    drawn = {(room, below) for room in ROOMS for below in ROOMS[room]}
    assert drawn == {
        (parts[1].removesuffix(".py"), module.split(".")[1])
        for file in sources()
        if (parts := file.relative_to(REPOSITORY).parts)[0] == "rljax" and parts[1] != "testing"
        for module, *_ in imports_of(file.read_text(), ".".join(parts[:-1]))
        if module.startswith("rljax.")
        and module.split(".")[1] in ROOMS
        and module.split(".")[1] != parts[1].removesuffix(".py")
    }


# Rooms of an engine, with those that each imports; what stands beside them is everyone's, and its plugin imports all.
ENGINE_ROOMS = {
    "jax": {"sampling": (), "learning": (), "planning": ("learning", "sampling")},
    "cuda": {"transports": (), "learning": ("transports",), "planning": ("learning",)},
}


@pytest.mark.parametrize("engine", ENGINE_ROOMS)
def test_rooms_of_an_engine_import_each_other_one_way(engine):
    rooms, home = ENGINE_ROOMS[engine], f"rljax.engines.{engine}."
    found = set()
    for file in (REPOSITORY / "engines" / engine).rglob("*.py"):
        own = file.relative_to(REPOSITORY / "engines" / engine).parts[0]
        named = {module.removeprefix(home).split(".")[0] for module, *_ in imports_of(file.read_text(), _package(file))}
        found |= {(own, room) for room in named & rooms.keys() if room != own}
    assert found == {
        *((room, below) for room, names in rooms.items() for below in names),
        *(("plugin.py", room) for room in rooms),
    }


# Distributions whose module has another name
MODULES = {"absl-py": "absl", "orbax-checkpoint": "orbax", "pyyaml": "yaml"}


def test_the_product_imports_what_it_depends_on():
    """What is not imported belongs to the extra of those who do."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[\[<>=~!; ]", dependency)[0] for dependency in project["dependencies"]]
    imported = {
        module.partition(".")[0]
        for file in sources()
        for module, *_ in imports_of(file.read_text(), ".".join(file.relative_to(REPOSITORY).parts[:-1]))
    }
    assert [name for name in names if MODULES.get(name, name.replace("-", "_")) not in imported] == []


def test_files_import_each_other_in_no_circle():
    """Over all layers, lazy imports included: whoever reads a file can read what it needs first."""
    modules = {_module(file): file for file in sources()}
    arrows = {
        name: {known for module, *_ in imports_of(file.read_text(), _package(file)) if (known := _known(module, modules))}
        - {name}
        for name, file in modules.items()
    }
    while free := {name for name, below in arrows.items() if not below & arrows.keys()}:
        arrows = {name: below for name, below in arrows.items() if name not in free}
    assert {name: below & arrows.keys() for name, below in arrows.items()} == {}


def _module(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join((["rljax"] if parts[0] in BARE else []) + list(parts)).removesuffix(".__init__")


def _package(file: Path) -> str:
    return _module(file) if file.name == "__init__.py" else _module(file).rpartition(".")[0]


def _known(module: str, modules: dict[str, Path]) -> str | None:
    """The module that an import reads: `from a.b import c` is of a.b.c where that is a module,
    else of a.b.
    """
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module or None


def test_every_layer_is_looked_at_once():
    files = sources()
    assert {file.relative_to(REPOSITORY).parts[0] for file in files} == {*LAYERS, "configs"} - {"testing"}
    assert len({file.resolve() for file in files}) == len(files)


def test_the_links_point_at_the_folders_beside():
    for name in BARE:
        link = REPOSITORY / "rljax" / name
        assert link.is_symlink() and link.resolve() == REPOSITORY / name and not link.readlink().is_absolute()


PLANTED = {
    "up from the core": ("rljax/loop.py", "import rljax.engines.jax.plugin"),
    "up from the core, by from": ("rljax/loop.py", "from rljax import backends"),
    "up from the core, relative": ("rljax/data/x.py", "from ..engines import jax"),
    "up from a backend": ("backends/jax/x.py", "from rljax.engines import jax"),
    "up from an engine": ("engines/jax/x.py", "def f():\n    from rljax.experiments import main"),
    "the suites from the tests": ("rljax/testing/x.py", "def f():\n    from tests import shared"),
    "jax in the core": ("rljax/objective/losses.py", "import jax.numpy as jnp"),
    "torch in the core, lazily": ("rljax/hf/x.py", "def f():\n    import torch"),
    "flax in a config": ("configs/x.py", "from flax import nnx"),
    "bare engines": ("experiments/x.py", "from engines.jax import plugin"),
    "bare configs": ("configs/x.py", "import configs.base"),
    "bare experiments": ("experiments/x.py", "from experiments import main"),
    "torch with the module": ("experiments/x.py", "import torch"),
    "torch in the JAX engine": ("engines/jax/x.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
    "sglang in a backend": ("backends/torch/x.py", "import sglang"),
    "the command in the core": ("rljax/loop.py", "def f():\n    from rljax.experiments import cli"),
    "by name": ("rljax/loop.py", "import importlib\ndef f():\n    importlib.import_module('jax')"),
}


@pytest.mark.parametrize(("path", "source"), PLANTED.values(), ids=list(PLANTED))
def test_a_planted_violation_is_caught(path, source):
    assert len(violations(path, source)) == 1


ALLOWED = {
    "down": (
        "experiments/x.py",
        "from rljax.engines.jax import plugin\nfrom rljax.backends.jax import model\nimport rljax.loop",
    ),
    "the framework of a backend": ("backends/jax/x.py", "import jax\nfrom flax import nnx"),
    "torch in its folders": ("backends/torch/x.py", "import torch"),
    "optional, lazily": ("engines/jax/x.py", "def f():\n    import torch"),
    "optional, for type checkers": (
        "engines/jax/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    "the command, which is no core": ("rljax/__main__.py", "from rljax.experiments.cli import main"),
    "relative": ("rljax/data/x.py", "from . import formats\nfrom ..errors import UserError"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=list(ALLOWED))
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []


DECLARED = {
    "its own": ("engines/jax/x.py", "from . import rows", "//rljax/engines/jax"),
    "its own, of a room": ("engines/jax/sampling/x.py", "from . import slots", "//rljax/engines/jax"),
    "a module of the core": ("engines/jax/x.py", "from rljax.data import tasks", "//rljax"),
    "a backend": ("engines/jax/x.py", "def f():\n    from rljax.backends.jax import model", "//rljax/backends/jax"),
    "a config": ("rljax/loop.py", "from rljax.configs.algorithms import grpo", "//rljax/configs"),
    "the folder of the engines": ("experiments/x.py", "from rljax import engines", "//rljax/engines"),
    "another binary": ("experiments/x.py", "from rljax.experiments.bench import packing", "//rljax/experiments"),
}


@pytest.mark.parametrize(("path", "source", "library"), DECLARED.values(), ids=list(DECLARED))
def test_an_import_is_of_a_library_that_is_declared(path, source, library):
    labels = {label for _, _, label in DECLARED.values()}
    assert undeclared(path, source, {library}) == []
    (line,) = undeclared(path, source, labels - {library})
    assert line.endswith(f"does not depend on {library}")
