"""Imports point one way: experiments -> engines -> backends -> rljax, and what is optional is imported when it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Layers from the bottom up, as folders of the repository. A layer imports itself and what is below it.
LAYERS = ("rljax", "backends", "engines", "experiments")
# Folders that other people's packages could be called: imported under `rljax.` only.
BARE = ("backends", "engines", "configs")
# Frameworks, and the folders that may import them.
FRAMEWORKS = {
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax"), ("backends", "engines", "experiments")),
    **dict.fromkeys(("torch", "torchvision"), ("backends", "engines", "experiments")),
}
# Packages that a base install lacks, and the folders that are only imported where they are there.
OPTIONAL = {
    **dict.fromkeys(
        ("torch", "peft"),
        ("backends/torch", "engines/cuda", "experiments/bench/logprobs_torch.py", "experiments/parity_torch.py"),
    ),
    "sglang": ("engines/cuda",),
    **dict.fromkeys(("wandb", "tensorboard", "gguf"), ()),
}


class Import(NamedTuple):
    """One imported module and where."""

    module: str  # dotted
    line: int
    lazy: bool  # inside a function, or only for type checkers


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a module of the package, `from a import b` as a and as a.b (either may be a module)."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node.lineno, lazy)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (Import(str(a.value), node.lineno, lazy) for a in node.args[:1] if isinstance(a, ast.Constant))
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            inside = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), lazy=False)


def layer_of(module: str) -> str | None:
    """The layer that a dotted module belongs to; None for other people's and for configs."""
    head, *rest = module.split(".")
    if head == "rljax" and rest and rest[0] in BARE:
        return rest[0] if rest[0] in LAYERS else None
    return head if head in LAYERS else None


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of a file, whose path is relative to the repository."""
    folder, *below = Path(path).parts
    package = ".".join((["rljax"] if folder in BARE else []) + [folder, *below[:-1]])
    found = []
    for module, line, lazy in imports_of(source, package):
        head = module.partition(".")[0]
        layer = layer_of(module)
        if head in BARE:
            found.append(f"{path}:{line}: import rljax.{module}, not {module}")
        elif folder in LAYERS and layer is not None and LAYERS.index(layer) > LAYERS.index(folder):
            found.append(f"{path}:{line}: {folder} must not import {module} (imports point down: {' -> '.join(LAYERS[::-1])})")
        elif head in FRAMEWORKS and folder not in FRAMEWORKS[head]:
            found.append(f"{path}:{line}: {folder} is framework-free and must not import {module}")
        elif head in OPTIONAL and not lazy and not any(Path(path).is_relative_to(home) for home in OPTIONAL[head]):
            found.append(f"{path}:{line}: {module} is optional: import it where it is used, not with the module")
    return found


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
