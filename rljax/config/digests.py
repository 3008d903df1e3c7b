"""Digests of the user's functions that a config names, to notice one that has changed its content.

A name stays when a reward is edited, or a notebook's cell is run again. The digest is of what
decides the results: code, constants, defaults, and what the code refers to, as far as it is the
user's own. File names, line numbers and comments are no part of it.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import json
import logging
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.config import io as config_io
from rljax.config import registry
from rljax.config.schema import Config
from rljax.config.sources import Sources, is_users

# Bytecode and syntax trees differ between versions of Python; the last number is that of what is followed here.
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}-2"
_OF_VALUES = {"re", "decimal", "fractions", "datetime", "pathlib"}  # modules whose objects are values
_objects: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

log = logging.getLogger(__name__)


def digests_of(config: Config) -> dict[str, str]:
    """Returns the digests of the user's functions and classes in a config, by "key name".

    Example: {"reward.name __main__:reward": "python3.11-2 0b1f..."}
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
    """Returns the syntax of a module's definition, and of all that it uses in the user's own files.

    The module is not imported: a reward is imported in the reward processes alone. It is empty if
    there is no such module, or it is of rljax, whose version is recorded.
    """
    if module.partition(".")[0] == "rljax":
        return ""
    sources = Sources()
    sources.add(module, [attribute], installed=True)
    return sources.text()


def _described(found: Any) -> str:
    """Describes an object of the calling program.

    An object that is no function and no class keeps the digest that it had when it was first seen,
    as it may count its calls.
    """
    walk = _Walk()
    described = json.dumps(walk.describe(found)) + walk.sources.text()
    if isinstance(found, type | types.FunctionType):
        return described
    try:
        return _objects.setdefault(found, described)
    except TypeError:  # it has no hash, or can't be weakly referenced
        return described


class _Walk:
    """Walk over all that an object refers to, as nested lists. Each object is described once.

    What packages define is described by its name.

    Attributes:
      sources: what functions use of the user's modules by "import mylib", or by an import of their
        own when they are called. It is read from the files, as reward processes read it.
    """

    def __init__(self) -> None:
        self._seen = dict[int, tuple[int, Any]]()
        self.sources = Sources()

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
        if of is not value and name[0].partition(".")[0] in _OF_VALUES:
            reduced = copyreg.dispatch_table[of](value) if of in copyreg.dispatch_table else value.__reduce_ex__(2)
            return [*name, self.describe(reduced[1:3])]
        if not _is_users(name[0]):
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
        self.sources.add_modules(function.__code__, function.__globals__)
        self.sources.add_imports(function.__code__, function.__globals__.get("__package__"))


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in code, nested functions included."""
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, nested))


_is_users = functools.cache(is_users)
