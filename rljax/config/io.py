"""Strict conversion between config files, command-line overrides, config.json and `Config`.

    config = load("configs/quickstart.py", [("actor.eps_clip", "0.3")])   # in a binary
    config = from_dict(base.get_config())                                 # in a test
    config == from_json(to_json(config))

The dataclasses of `rljax/config/schema/` and those of the engines are the schema: a key they
don't have, a key that is missing and a value of another type are each refused with one line. An
engine's section may be left out, or have some keys only. Overrides are read by that schema and not
by `config_flags`, which takes a field's type from its current value: it can't set an optional key
back to None, and answers a wrong key with a traceback.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
import runpy
import traceback
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rljax import entry_points
from rljax.config import engine_sections, files
from rljax.config.allocation import engines_of
from rljax.config.foreign import areal, key_names
from rljax.config.keys import Leaf, join, types_of, unwrap_optional, walk
from rljax.config.schema import Config, EngineConfig
from rljax.errors import UserError

# Other spellings of a key. If a file or override uses one, it wins over the default under the usual name.
ALIASES = {"actor.recompute_logprobs": "actor.recompute_logprob"}

_JSON_SCALARS = (bool, int, float, str, type(None))

T = typing.TypeVar("T")


# Reading -----------------------------------------------------------------------------------------------------------------


def load(location: str, overrides: Sequence[tuple[str, str | None]] = ()) -> Config:
    """Runs a config file's `get_config()` (or reads a YAML file), applies overrides and converts.

    Args:
      location: a Python file or the name of one that comes with rljax, or "FILE:ARGUMENT" for a
        get_config that takes one string; or a YAML file of AReaL's.
      overrides: (dotted key, text) pairs, as in `--config.actor.eps_clip=0.3`; the last one wins.
        The text may be None for a bool, which is True then.

    Raises:
      UserError: on anything that isn't a config.
    """
    tree = areal.load(location) if areal.is_areal(location) else _plain(_run_config_file(location))
    for key, text in overrides:
        apply_override(tree, key, text)
    try:
        return from_dict(tree)
    except UnknownKey as error:  # of the file: those of the overrides are refused above
        raise UserError(f"--config: {location}: {error}") from None


def from_dict(tree: Mapping[str, Any] | ConfigDict) -> Config:
    """Converts a nested mapping or ConfigDict to a Config.

    Raises UserError on an unknown or missing key or a wrong type.
    """
    plain = _plain(tree)
    names = [name for name in plain if name not in types_of(Config)]
    engines = {name: _engine_section(name, plain.pop(name)) for name in names}
    config: Config = _section(Config, plain, "")
    return dataclasses.replace(config, engines=engines)


def to_dict(config: Config) -> dict[str, Any]:
    """Returns a nested dict of all keys; the sections of engines are at the top level, by name."""
    tree = {name: _plain_of(getattr(config, name)) for name in types_of(Config)}
    return tree | {name: _plain_of(values) for name, values in config.engines.items()}


def _plain_of(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def changed(config: Config, overrides: Sequence[tuple[str, str | None]]) -> Config:
    """Applies command-line overrides to a config. Raises UserError."""
    tree = to_dict(config)
    for key, text in overrides:
        apply_override(tree, key, text)
    return from_dict(tree)


def with_defaults(config: Config, keys: Iterable[str]) -> Config:
    """Returns a config in which these keys, by their dotted names, have their defaults."""
    engines = {name: type(values)() for name, values in config.engines.items()}
    tree, defaults = to_dict(config), to_dict(dataclasses.replace(Config(), engines=engines))
    for key in keys:
        holder, _, leaf = key.rpartition(".")
        into, of = (_descend(each, holder) if holder else each for each in (tree, defaults))
        assert into is not None and of is not None, key
        into[leaf] = of[leaf]
    return from_dict(tree)


def section_with(values: T, changes: Any, path: str) -> T:
    """Returns a section with some of its keys changed.

    Args:
      values: an instance of a section.
      changes: the keys that differ, a mapping.
      path: dotted name of the section, for errors.

    Raises UserError for an unknown key or a value of another type or out of range.
    """
    changed = _section(type(values), _filled(values, changes) if isinstance(changes, Mapping) else changes, path)
    for leaf in walk(changed, path):
        leaf.key.check(leaf.path, leaf.value)
    return typing.cast(T, changed)


def from_json(text: str, *, fill: bool = False) -> Config:
    """Reads a config from the text that `to_json` wrote. Raises UserError.

    Args:
      fill: give keys that the text lacks their defaults: an earlier release wrote it.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"config.json: not JSON: {error}") from None
    return from_dict(_filled(Config(), tree) if fill and isinstance(tree, dict) else tree)


def to_json(config: Config) -> str:
    """Returns the text of config.json: all keys with their values."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"


def resolve(config: Config) -> Config:
    """Fills in values that follow from other keys, so that config.json says what the run does.

    These are each None that stands for the value of another key, and the sections of the engines
    that `allocation_mode` names. Raises UserError for a mode that can't be read.
    """
    engines = dict(config.engines)
    for name in engines_of(config.allocation_mode):
        if name not in engines and name in entry_points.names() and (schema := engine_sections.find(name)):
            engines[name] = schema()
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(
            config.rollout,
            consumer_batch_size=config.batch_size,
            max_concurrent_rollouts=config.max_in_flight,
            episode_timeout=config.episode_timeout,
            request_timeout=config.request_timeout,
        ),
        actor=dataclasses.replace(
            config.actor, eps_clip_higher=config.clip_high, loss_aggregation_constant=config.aggregation_constant
        ),
        engines=engines,
    )


# Config files ------------------------------------------------------------------------------------------------------------


def _run_config_file(location: str) -> Mapping[str, Any] | ConfigDict:
    name, colon, argument = location.partition(":")
    filename = str(files.find(name))
    try:
        get_config = runpy.run_path(filename).get("get_config")
        if get_config is None:
            raise UserError(f"--config: {filename} defines no get_config()")
        tree = get_config(argument) if colon else get_config()
    except UserError:
        raise
    except Exception as error:  # the file is the user's own code: report file and line of whatever it raises
        line = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == filename), None)
        line = error.lineno if isinstance(error, SyntaxError) else line
        reason = " ".join(str(error).split())
        raise UserError(f"--config: {filename}:{line}: {type(error).__name__}: {reason}") from error
    if not isinstance(tree, Mapping | ConfigDict):
        raise UserError(f"--config: get_config() of {filename} returns {type(tree).__name__}, not a ConfigDict")
    return tree


def _plain(tree: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Copies a tree to a nested dict, with aliases replaced by the keys they stand for."""
    try:
        nested = typing.cast(dict[str, Any], _plain_value(tree))
    except (ValueError, TypeError) as error:  # a required placeholder that nobody filled, a reference of another type
        raise UserError(f"config: {' '.join(str(error).split())}") from None
    for alias, name in ALIASES.items():
        holder, _, leaf = alias.rpartition(".")
        section = _descend(nested, holder)
        if section is not None and leaf in section:
            section[name.rpartition(".")[2]] = section.pop(leaf)
    return nested


def _plain_value(value: Any) -> Any:
    if isinstance(value, ConfigDict):
        value = value.to_dict()
    return {key: _plain_value(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _descend(tree: dict[str, Any], path: str) -> dict[str, Any] | None:
    for name in path.split("."):
        child = tree.get(name)
        if not isinstance(child, dict):
            return None
        tree = child
    return tree


# Overrides ---------------------------------------------------------------------------------------------------------------


def apply_override(tree: dict[str, Any], key: str, text: str | None) -> None:
    """Sets one key of the tree from its text on the command line; None sets a bool to True."""
    key = ALIASES.get(key, key)
    schema: Any = Config
    names = key.split(".")
    for depth, name in enumerate(names):
        prefix = ".".join(names[:depth])
        if typing.get_origin(schema) is dict:  # any key is allowed below it, and values are Python literals
            schema = object
            tree = _child(tree, names[depth - 1], prefix)
            _set(tree, names[depth:], _read(object, text, key))
            return
        if not dataclasses.is_dataclass(schema):
            raise UserError(f"{key}: {prefix} is a value, not a section")
        if depth:
            tree = _child(tree, names[depth - 1], prefix)
        schema = _schema_of(typing.cast(type, schema), prefix, name, key)
    if dataclasses.is_dataclass(schema):
        keys = ", ".join(f"{key}.{name}" for name in types_of(schema))
        raise UserError(f"{key}: a section; set one of its keys: {keys}")
    tree[names[-1]] = _read(schema, text, key)


def _child(tree: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    child = tree.setdefault(name, {})
    if not isinstance(child, dict):
        raise UserError(f"{path}: expected a section, got {child!r}")
    return child


def _set(tree: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets a value below nested names, which are made where they are missing; others stay."""
    *parents, last = names
    for name in parents:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def _read(schema: Any, text: str | None, key: str) -> Any:
    """Converts a command-line text to the type of its field."""
    optional, schema = unwrap_optional(schema)
    if text is None:
        if schema is not bool:
            raise UserError(f"{key}: needs a value (--config.{key}=VALUE)")
        return True
    if optional and text in ("None", "none", "null"):
        return None
    if schema is str:
        return text
    if schema is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    if schema in (int, float):
        try:
            return schema(text)
        except ValueError:
            return text  # the conversion refuses it
    if typing.get_origin(schema) is tuple and not text.startswith(("(", "[")):
        return tuple(_read(typing.get_args(schema)[0], part, key) for part in text.split(",")) if text else ()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Conversion --------------------------------------------------------------------------------------------------------------


def _engine_section(name: str, tree: Any) -> EngineConfig:
    """Converts an engine's section; keys that the tree lacks have their defaults."""
    schema = _schema_of(Config, "", name)
    filled = _filled(schema(), tree) if isinstance(tree, Mapping) else tree
    return typing.cast(EngineConfig, _section(schema, filled, name))


def _filled(defaults: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the defaults of a section for the keys that the tree lacks."""
    filled = dict(tree)
    for name in types_of(defaults):
        value = getattr(defaults, name)
        if name not in tree:
            filled[name] = _plain_of(value)
        elif dataclasses.is_dataclass(value) and isinstance(tree[name], Mapping):
            filled[name] = _filled(value, tree[name])
    return filled


def _section(schema: type, tree: Any, path: str) -> Any:
    if not isinstance(tree, Mapping):
        raise UserError(f"{path or 'config'}: expected a section, got {tree!r}")
    kinds = types_of(schema)
    for name in tree:
        if name not in kinds:
            raise _unknown_key(schema, path, name)
    for name in kinds:
        if name not in tree:
            raise UserError(
                f"{join(path, name)}: missing (start from base.get_config() of configs/base.py, which has its default)"
            )
    return schema(**{name: _value(kind, tree[name], join(path, name)) for name, kind in kinds.items()})


def _value(schema: Any, value: Any, path: str) -> Any:
    """Converts a value to its field's type. Raises UserError."""
    optional, schema = unwrap_optional(schema)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(schema):
        return _section(typing.cast(type, schema), value, path)
    if typing.get_origin(schema) is tuple:
        if not isinstance(value, tuple | list):
            raise _wrong_type(path, schema, optional, value)
        return tuple(_value(typing.get_args(schema)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if typing.get_origin(schema) is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(path, schema, optional, value)
        return {key: _json_value(item, f"{path}.{key}") for key, item in value.items()}
    if schema is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not schema:
        raise _wrong_type(path, schema, optional, value)
    if schema is float and not math.isfinite(value):
        raise UserError(f"{path}: must be a finite number, not {value}")
    return value


def _json_value(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_json_value(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, _JSON_SCALARS):
        raise UserError(f"{path}: {type(value).__name__} is not a JSON value (numbers, strings, booleans, lists, dicts)")
    return value


_TYPE_NAMES: Mapping[Any, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _wrong_type(path: str, schema: Any, optional: bool, value: Any) -> UserError:
    expected = _TYPE_NAMES.get(schema)
    if typing.get_origin(schema) is tuple:
        expected = f"a list, each entry {_TYPE_NAMES[typing.get_args(schema)[0]]}"
    return UserError(f"{path}: expected {expected or 'a dict'}{' or None' if optional else ''}, got {value!r}")


# Names -------------------------------------------------------------------------------------------------------------------


def leaves() -> list[str]:
    """Returns all dotted keys that hold a value, those of the installed engines included."""
    return [leaf.path for leaf in walk(Config())] + [
        leaf.path for name in entry_points.names() for leaf in _engine_leaves(name)
    ]


def _engine_leaves(name: str) -> list[Leaf]:
    """Returns the keys of an engine's section.

    Empty if it has no section or its plugin can't be imported.
    """
    try:
        schema = engine_sections.find(name)
    except UserError:  # another engine's error does not concern this config
        return []
    return list(walk(schema(), name)) if schema else []


def _schema_of(schema: type, path: str, name: str, key: str = "") -> Any:
    """Returns the type of a key, or the dataclass of a section.

    Raises UserError for a name that isn't there.
    """
    if name in types_of(schema):
        return types_of(schema)[name]
    if schema is not Config or name not in entry_points.names():
        raise _unknown_key(schema, path, name, key)
    engine = engine_sections.find(name)
    if engine is None:
        raise UserError(f"{name}: the engine {name} has no settings")
    return engine


class UnknownKey(UserError):
    """A config has a key that does not exist."""


def _unknown_key(schema: type, path: str, name: str, key: str = "") -> UnknownKey:
    """Makes the error for an unknown key.

    It names the keys of that name below this section; else what another system calls exactly so;
    else the nearest key beside it; else the key of another system that ends so; else the keys of
    that name elsewhere; else all keys there.

    Args:
      key: all of it, where the name is a section's.
    """
    siblings = list(types_of(schema))
    engines = entry_points.names() if schema is Config else []
    elsewhere = [key for key in leaves() if key.rpartition(".")[2] == name]
    below = [key for key in elsewhere if path and key.startswith(f"{path}.")]
    whole = key or join(path, name)
    is_foreign = key_names.knows(whole, name)
    close = below or ([] if is_foreign else difflib.get_close_matches(name, siblings + engines, n=1, cutoff=0.8))
    hint = "" if close else key_names.hint(whole, name, is_ours=bool(elsewhere))
    if hint:
        return UnknownKey(f"{join(path, name)}: no such key ({hint})")
    close = close or elsewhere or difflib.get_close_matches(name, siblings + engines, n=1) or _like(name, path)
    if close:
        remedy = f"did you mean {' or '.join(close)}"
    else:
        remedy = f"known: {', '.join(siblings)}" + (f"; installed engines: {', '.join(engines)}" if engines else "")
    return UnknownKey(f"{join(path, name)}: no such key ({remedy})")


def _like(name: str, path: str) -> list[str]:
    """Returns the keys below a section whose last names are nearest to a name."""
    below = [leaf for leaf in leaves() if path and leaf.startswith(f"{path}.")]
    near = difflib.get_close_matches(name, {leaf.rpartition(".")[2] for leaf in below}, n=1, cutoff=0.75)
    return [leaf for leaf in below if leaf.rpartition(".")[2] in near]
