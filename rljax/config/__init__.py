"""The config: its schema, where it comes from, and what is checked of it before anything starts.

schema.py           every key, once: type, default, range or choices, unit, description; schema_training.py has a part of them
keys.py             how a key is declared
engine_sections.py  sections of installed engines, which declare them themselves
defaults.py         every default as a ConfigDict, for config files
files.py            the file that --config names
io.py               config files, overrides and config.json, there and back
checks.py           ranges, choices, and keys that contradict each other
reference.py        docs/config.md, from the schema
resume.py           which keys may change between the runs of one workdir
allocation.py       `allocation_mode`: which engine runs where
registry.py         what a config names: a reward, a workflow, a filter
areal.py            a YAML file written for AReaL as a config of ours; areal_keys.py is its table
"""
