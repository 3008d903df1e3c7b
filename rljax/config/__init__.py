"""The config: its schema, its sources, and the checks made before anything starts.

schema/             every key, once: type, default, range or choices, unit, description
keys.py             how a key is declared
engine_sections.py  sections of installed engines, which declare them themselves
defaults.py         every default as a ConfigDict, for config files
files.py            the file that --config names
io.py               reads and writes config files, overrides and config.json
checks.py           ranges, choices, and keys that contradict each other
no_effect.py        keys that another key switches off
arguments.py        ranges of arguments that a config passes on, as those of a workflow
validation.py       validation sets by name
learning_rate.py    the learning rate over a run
reference.py        writes docs/config.md from the schema
resume.py           keys that may change between the runs of one workdir
allocation.py       `allocation_mode`: which engine runs on which devices
registry.py         finds what a config names: a reward, a workflow, a filter
digests.py          tells whether such a function has changed between the runs of one workdir
sources.py          finds the source that such a function depends on, across the user's files
foreign/            configs and names of other systems, as keys of this one
"""
