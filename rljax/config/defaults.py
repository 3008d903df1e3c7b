"""All defaults as an ml_collections ConfigDict, made from the schema for `configs/base.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict, config_dict

from rljax import entry_points
from rljax.config import engine_sections
from rljax.config.keys import types_of, unwrap_optional
from rljax.config.schema import Config


class _Defaults(ConfigDict):
    """A ConfigDict that adds the section of an installed engine when it is first named.

    Example: `config.jax.slots = 8`. Adding them all at once would import the plugin of every
    installed engine.
    """

    def __contains__(self, key: str) -> bool:
        self._add_section(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._add_section(str(key).partition(".")[0])
        return super().__getitem__(key)

    def _add_section(self, name: str) -> None:
        if name.startswith("_") or name in self.keys() or name not in entry_points.names():
            return
        if schema := engine_sections.find(name):
            self[name] = _as_config_dict(schema())


def get_config() -> ConfigDict:
    """Returns all keys of the schema with their defaults.

    A default of None is a placeholder, so that the key keeps its type.
    """
    config = _Defaults()
    for name, value in _as_config_dict(Config()).items(preserve_field_references=True):
        config[name] = value
    return config


def _as_config_dict(values: Any) -> ConfigDict:
    tree = ConfigDict()
    for name, kind in types_of(values).items():
        value = getattr(values, name)
        optional, kind = unwrap_optional(kind)
        if dataclasses.is_dataclass(kind):
            tree[name] = _as_config_dict(value)
        elif isinstance(value, dict):
            tree[name] = ConfigDict(value)
        elif optional and value is None:
            tree[name] = config_dict.placeholder(kind)
        else:
            tree[name] = value
    return tree
