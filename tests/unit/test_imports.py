"""Imports point one way: experiments -> engines -> backends -> rljax, and what is optional is imported when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.import_rule import BARE, LAYERS, undeclared, violations

REPOSITORY = Path(__file__).resolve().parents[2]


def sources() -> list[Path]:
    """Python files of the repository, each once: not through the links inside rljax/."""
    folders = (*LAYERS, "configs")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    links = [REPOSITORY / "rljax" / name for name in BARE]
    return [file for file in files if not any(file.is_relative_to(link) for link in links)]


def test_imports_point_one_way():
    found = []
    for file in sources():
        found += violations(str(file.relative_to(REPOSITORY)), file.read_text())
    assert not found, "\n".join(found)


def test_every_layer_is_looked_at_once():
    files = sources()
    assert {file.relative_to(REPOSITORY).parts[0] for file in files} == {*LAYERS, "configs"}
    assert len({file.resolve() for file in files}) == len(files)


def test_the_links_point_at_the_folders_beside():
    for name in BARE:
        link = REPOSITORY / "rljax" / name
        assert link.is_symlink() and link.resolve() == REPOSITORY / name and not link.readlink().is_absolute()


PLANTED = {
    "up from the core": ("rljax/loop.py", "import rljax.engines.jax.sampler"),
    "up from the core, by from": ("rljax/loop.py", "from rljax import backends"),
    "up from the core, relative": ("rljax/data/x.py", "from ..engines import jax"),
    "up from a backend": ("backends/jax/x.py", "from rljax.engines import jax"),
    "up from an engine": ("engines/jax/x.py", "def f():\n    from experiments import main"),
    "jax in the core": ("rljax/losses.py", "import jax.numpy as jnp"),
    "torch in the core, lazily": ("rljax/hf.py", "def f():\n    import torch"),
    "flax in a config": ("configs/x.py", "from flax import nnx"),
    "bare engines": ("experiments/x.py", "from engines.jax import sampler"),
    "bare configs": ("configs/x.py", "import configs.base"),
    "torch with the module": ("experiments/x.py", "import torch"),
    "torch in the JAX engine": ("engines/jax/x.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
    "sglang in a backend": ("backends/torch/x.py", "import sglang"),
    "by name": ("rljax/x.py", "import importlib\ndef f():\n    importlib.import_module('jax')"),
}


@pytest.mark.parametrize(("path", "source"), PLANTED.values(), ids=list(PLANTED))
def test_a_planted_violation_is_caught(path, source):
    assert len(violations(path, source)) == 1


ALLOWED = {
    "down": (
        "experiments/x.py",
        "from rljax.engines.jax import sampler\nfrom rljax.backends.jax import model\nimport rljax.loop",
    ),
    "the framework of a backend": ("backends/jax/x.py", "import jax\nfrom flax import nnx"),
    "torch in its folders": ("backends/torch/x.py", "import torch"),
    "optional, lazily": ("engines/jax/x.py", "def f():\n    import torch"),
    "optional, for type checkers": (
        "engines/jax/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    "relative": ("rljax/data/x.py", "from . import formats\nfrom ..errors import UserError"),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=list(ALLOWED))
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []


DECLARED = {
    "its own": ("engines/jax/x.py", "from . import slots", "//rljax/engines/jax"),
    "a module of the core": ("engines/jax/x.py", "from rljax.data import tasks", "//rljax"),
    "a backend": ("engines/jax/x.py", "def f():\n    from rljax.backends.jax import model", "//rljax/backends/jax"),
    "a config": ("rljax/x.py", "from rljax.configs.algorithms import grpo", "//rljax/configs"),
    "the folder of the engines": ("experiments/x.py", "from rljax import engines", "//rljax/engines"),
    "another binary": ("experiments/x.py", "from experiments.bench import packing", "//experiments"),
}


@pytest.mark.parametrize(("path", "source", "library"), DECLARED.values(), ids=list(DECLARED))
def test_an_import_is_of_a_library_that_is_declared(path, source, library):
    labels = {label for _, _, label in DECLARED.values()}
    assert undeclared(path, source, {library}) == []
    (line,) = undeclared(path, source, labels - {library})
    assert line.endswith(f"does not depend on {library}")
