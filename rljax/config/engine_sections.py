"""Sections of installed engines, by name. A plugin is imported when its section is first used.

find("jax")      # JaxConfig: what the plugin names as `config_class`
find("vllm")     # UserError that lists the installed engines, if none has this name
"""

from __future__ import annotations

import dataclasses

from rljax import entry_points
from rljax.config.keys import types_of
from rljax.config.schema import Config, EngineConfig
from rljax.errors import UserError


def find(name: str) -> type[EngineConfig] | None:
    """Returns the dataclass of an engine's section, or None for an engine without settings.

    Raises:
      UserError: no such engine, its plugin can't be imported, or its section is not a valid one.
    """
    if name in types_of(Config):
        raise UserError(f"{name}: an engine can't have the name of a key of the config (call its entry point otherwise)")
    try:
        plugin = entry_points.load(name)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    schema = getattr(plugin, "config_class", None)
    return None if schema is None else _section(name, schema)


def _section(name: str, schema: object) -> type[EngineConfig]:
    """Checks and returns the plugin's `config_class`.

    Raises UserError for a mistake of its author, before it reads any of the user's keys.
    """
    if not (isinstance(schema, type) and issubclass(schema, EngineConfig) and "__dataclass_fields__" in vars(schema)):
        raise UserError(
            f"{name}: config_class of its plugin is {schema!r}, not a dataclass over rljax.config.schema.EngineConfig"
        )
    bare = [field.name for field in dataclasses.fields(schema) if field.name not in types_of(schema)]
    if bare:
        raise UserError(f"{name}.{bare[0]}: {schema.__qualname__} declares it without rljax.config.keys.key")
    return schema
