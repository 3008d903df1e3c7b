"""Where config files start: every default of the schema, and the sections of the engines that are installed.

docs/config.md has every key with its default; `rljax/config/schema.py` is where they are declared.
"""

from ml_collections import ConfigDict

from rljax.config import defaults


def get_config() -> ConfigDict:
    """A config with every default. The section of an engine, as `config.jax`, is there when it is named."""
    return defaults.get_config()
