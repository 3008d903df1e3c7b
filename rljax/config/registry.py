"""Objects that a config names: one of rljax's by a short name, or the user's own.

The user's are named by "package.module:attribute". An object that only the calling program has (of
a script, or a notebook's cell) gets such a name by `provide`.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError


def resolve(
    key: str, name: str, shipped: Mapping[str, str], kind: str, takes: Sequence[str] = (), *, may_be_async: bool = True
) -> Any:
    """Returns the object that `name` stands for.

    Example:
      resolve("reward.name", "exact", {"exact": "rljax.rewards.exact:reward"}, "reward",
        ("prompt", "completion"))

    Args:
      key: the config key that holds the name, for the error.
      name: a short name, or "package.module:attribute".
      shipped: short name -> "package.module:attribute".
      kind: a noun for the error: "reward", "workflow", ...
      takes: the positional arguments that it will be called with; empty to leave that unchecked.
      may_be_async: whether what it returns is awaited; else an async function is refused.

    Raises:
      UserError: the name is unknown or can't be imported, or its object can't be called that way.
    """
    if name not in shipped and ":" not in name:
        raise UserError(f"{key}: no {kind} named {name!r} ({nearest(name, shipped)}, or 'package.module:attribute')")
    found = _provided[name] if name in _provided else _import(key, shipped.get(name, name), kind)
    if takes:
        _check_call(key, name, found, kind, takes)
    if not may_be_async and (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)):
        raise UserError(f"{key}: {name} is async, and a {kind} is called without await (make it a plain function)")
    return found


_provided: dict[str, Any] = {}  # objects that no module has under their name


def provide(found: Any) -> str:
    """Returns a name for an object, by which this process can `resolve` it.

    It is "module:attribute" where a module has it under that name, which any process can import.
    """
    of = found if hasattr(found, "__qualname__") else type(found)
    name = f"{of.__module__}:{of.__qualname__}"
    module = None if of.__module__ == "__main__" else sys.modules.get(of.__module__)
    if getattr(module, of.__qualname__, None) is not found:
        _provided[name] = found
    return name


def is_provided(name: str) -> bool:
    """Returns whether a name stands for an object of this process alone."""
    return name in _provided


def provided(name: str) -> Any:
    """Returns the object that was provided under a name."""
    return _provided[name]


def packed(key: str, names: Iterable[str]) -> str:
    """Returns the objects among the names that were provided, for `unpack` in a child process.

    It is empty if there are none.

    Raises UserError, about `key`, for an object that can't be sent.
    """
    objects = {name: _provided[name] for name in names if name in _provided}
    if not objects:
        return ""
    try:
        return base64.b64encode(_dumped(objects)).decode()
    except Exception as error:  # of whatever the object refers to
        raise UserError(
            f"{key}: {', '.join(objects)} cannot be sent to another process: {' '.join(str(error).split())}"
        ) from error


def _dumped(objects: Mapping[str, Any]) -> bytes:
    """Pickles objects with their code, which keeps the names of its files: cloudpickle drops them.

    Errors that the code raises elsewhere name file and line.
    """
    import cloudpickle

    reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
    with_file = {types.CodeType: lambda code: (_code_of_file, (code.co_filename, *reduce(code)))}

    class Pickler(cloudpickle.Pickler):
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(with_file)

    Pickler(written := io.BytesIO()).dump(objects)
    return written.getvalue()


def _code_of_file(file: str, make: Callable[..., types.CodeType], arguments: Sequence[Any]) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


def unpack(text: str) -> None:
    """Takes the objects that the parent process has `packed`, and from nobody else."""
    _provided.update(pickle.loads(base64.b64decode(text)))


def _check_call(key: str, name: str, found: Any, kind: str, takes: Sequence[str]) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        has = ", ".join(signature.parameters)
        wants = ", ".join(takes)
        raise UserError(f"{key}: {name} takes ({has}), and a {kind} is called with ({wants}): {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggests the names most like a wrong one; if none is similar, lists the first that are known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return f"there are {len(names)}: " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _import(key: str, location: str, kind: str) -> Any:
    module_name, _, attribute = location.partition(":")
    if module_name.endswith(".py"):
        file = Path(module_name)
        start = f", with {file.parent} in PYTHONPATH" if file.name != module_name else ""
        raise UserError(
            f"{key}: {module_name} is a file, and a {kind} is found by its module (write {file.stem}:{attribute}{start})"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the user's own code: it may raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"{key}: cannot import {module_name}: {type(error).__name__}: {reason}") from error
    if not hasattr(module, attribute):
        raise UserError(f"{key}: {module_name} has no {attribute!r} ({nearest(attribute, public_names(module))})")
    found = getattr(module, attribute)
    if not callable(found):
        raise UserError(f"{key}: {location} is a {type(found).__name__}, not a {kind}")
    return found


def public_names(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
