"""Memory and time of a run that has not started, for a plan.

footprint.py     by arithmetic
compile_only.py  by the compiler: programs of a plan, for devices that are not there
topology.py      how XLA is told of TPUs that are not there; cuda_target.py, of GPUs
hlo.py           searches of a compiled program's text
"""
