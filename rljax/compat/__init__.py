"""Names that code written for other systems imports, so that it runs here.

areal.py has the names that a workflow of AReaL's imports; areal_workflow.py runs such a workflow.
Reward functions and data sets of AReaL, TRL and verl need nothing from here (docs/migrating.md).
"""
