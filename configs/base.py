"""Base of all config files: the defaults of the schema and of the installed engines' sections.

docs/config.md has every key with its default; `rljax/config/schema/` declares them.
"""

from ml_collections import ConfigDict

from rljax.config import defaults


def get_config() -> ConfigDict:
    """Returns a config of all defaults; an engine's section, as `config.jax`, appears when named."""
    return defaults.get_config()
