"""Digests of the user's functions that a config names, to notice one that has changed its content.

A name stays when a reward is edited, or a notebook's cell is run again. The digest is of what
decides the results: code, constants, defaults, and what the code refers to, as far as it is the
user's own. File names, line numbers and comments are no part of it.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import importlib.util
import json
import logging
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.config import io as config_io
from rljax.config import registry
from rljax.config.schema import Config

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"  # bytecode and syntax trees differ between them
_OF_VALUES = {"re", "decimal", "fractions", "datetime", "pathlib"}  # modules whose objects are values
_objects: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

log = logging.getLogger(__name__)


def digests_of(config: Config) -> dict[str, str]:
    """Returns the digests of the user's functions and classes in a config, by "key name".

    Example: {"reward.name __main__:reward": "python3.11 0b1f..."}
    """
    found = {}
    for key, value in _leaves(json.loads(config_io.to_json(config))):
        for name in (part.strip() for part in value.split(",")):
            if ":" in name and (digest := _digest_of(name)):
                found[f"{key} {name}"] = digest
    return found


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Warns of the functions that have their names still, and another content.

    Args:
      before: digests of the session that made the newest step. Those of another Python say nothing.
      now: digests of this session.
    """
    for name, digest in now.items():
        was = str(before.get(name, digest))
        if was != digest and was.split()[0] == digest.split()[0]:
            log.warning(
                "the run goes on with another %s: its code, or what it refers to, has changed since the last step"
                " (another workdir begins anew)",
                name,
            )


def of_last_step(sessions: Sequence[Mapping[str, Any]], finished_steps: int) -> Mapping[str, Any]:
    """Returns the digests of the session that made the newest step; empty without one."""
    made = [one for one in sessions if isinstance(first := one.get("first_step"), int) and first < finished_steps]
    digests = made[-1].get("functions") if made else None
    return digests if isinstance(digests, Mapping) else {}


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the strings of a config by their keys."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, key)
    elif isinstance(tree, str):
        yield key, tree


def _digest_of(name: str) -> str:
    """Returns the digest of what a name stands for; empty if that is no function of the user's."""
    module, _, attribute = name.partition(":")
    try:
        described = _described(registry.provided(name)) if registry.is_provided(name) else _source(module, attribute)
    except Exception as error:  # of an object of the user's that answers no question; no reason to end a run
        log.debug("%s has no digest: %s", name, error)
        return ""
    return f"{_PYTHON} {hashlib.blake2b(described.encode(), digest_size=16).hexdigest()}" if described else ""


def _source(module: str, attribute: str) -> str:
    """Returns the syntax of a module's definition, and of those of the same file that it uses.

    The module is not imported: a reward is imported in the reward processes alone. It is empty if
    there is no such module, or it is of rljax, whose version is recorded.
    """
    if module.partition(".")[0] == "rljax":
        return ""
    try:
        spec = importlib.util.find_spec(module)
        text = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        statements = ast.parse(text).body
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError):
        return ""
    wanted, used = {attribute.partition(".")[0]}, dict[int, ast.stmt]()
    while new := {i: s for i, s in enumerate(statements) if i not in used and wanted & _bound(s)}:
        used |= new
        wanted |= {node.id for s in new.values() for node in ast.walk(s) if isinstance(node, ast.Name)}
    return "\n".join(ast.dump(used[i]) for i in sorted(used))


def _bound(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module binds, those of its branches included."""
    names: set[str] = set()
    for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names or {getattr(statement, "name", "")}


def _described(found: Any) -> str:
    """Describes an object of the calling program.

    An object that is no function and no class keeps the digest that it had when it was first seen,
    as it may count its calls.
    """
    described = json.dumps(_Walk().describe(found))
    if isinstance(found, type | types.FunctionType):
        return described
    try:
        return _objects.setdefault(found, described)
    except TypeError:  # it has no hash, or can't be weakly referenced
        return described


class _Walk:
    """Walk over all that an object refers to, as nested lists. Each object is described once.

    What packages define is described by its name.
    """

    def __init__(self) -> None:
        self._seen = dict[int, tuple[int, Any]]()

    def describe(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return [type(value).__name__, repr(value)]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)][0]]
        self._seen[id(value)] = (len(self._seen), value)  # kept alive, so that its id stays its own
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(self.describe, value)]
        if isinstance(value, set | frozenset):
            return [type(value).__name__, *sorted(repr(self.describe(each)) for each in value)]
        if isinstance(value, Mapping):
            return [type(value).__name__, *([self.describe(k), self.describe(v)] for k, v in value.items())]
        if isinstance(value, np.ndarray):
            return ["array", str(value.dtype), list(value.shape), hashlib.blake2b(value.tobytes()).hexdigest()]
        return self._defined(value)

    def _defined(self, value: Any) -> Any:
        """Describes code, functions, classes and objects."""
        if isinstance(value, types.CodeType):
            return [value.co_name, value.co_code.hex(), *map(self.describe, (value.co_names, value.co_consts))]
        if isinstance(value, types.MethodType):
            return [self.describe(value.__func__), self.describe(value.__self__)]
        if isinstance(value, functools.partial):
            return [self.describe(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, staticmethod | classmethod):
            return self.describe(value.__func__)
        if isinstance(value, property):
            return [self.describe(part) for part in (value.fget, value.fset)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        of = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        name = [str(of.__module__), of.__qualname__]
        package = name[0].partition(".")[0]
        if of is not value and package in _OF_VALUES:
            reduced = copyreg.dispatch_table[of](value) if of in copyreg.dispatch_table else value.__reduce_ex__(2)
            return [*name, self.describe(reduced[1:3])]
        if not _is_users(package):
            return name
        if isinstance(value, types.FunctionType):
            return [name[1], *self._function(value)]
        if isinstance(value, type):
            members = {k: v for k, v in vars(value).items() if not k.startswith("__") or isinstance(v, types.FunctionType)}
            return [name[1], self.describe(value.__bases__), self.describe(members)]
        return [name[1], self.describe(type(value)), self.describe(getattr(value, "__dict__", {}))]

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        """Yields a function's parts: code, defaults, closure, and the globals that it names."""
        yield from map(self.describe, (function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield self.describe(cell.cell_contents)
            except ValueError:  # empty: the name is bound later
                yield "empty"
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield [name, self.describe(function.__globals__[name])]


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in code, nested functions included."""
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, nested))


@functools.cache
def _is_users(package: str) -> bool:
    """Returns whether a top-level module is the user's own: not installed, Python's or rljax."""
    if package in ("__main__", "rljax", "builtins"):
        return package == "__main__"
    file = getattr(sys.modules.get(package), "__file__", None)
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in installed)
