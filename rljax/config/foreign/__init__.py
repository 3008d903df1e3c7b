"""Configs and names of other systems, as keys of this one.

areal.py            reads a YAML file written for AReaL
areal_keys.py       its table of keys
areal_objective.py  what its settings of advantages and loss become, or why they can't
key_names.py        keys of TRL's and verl's configs, for the hint at an unknown key
"""
