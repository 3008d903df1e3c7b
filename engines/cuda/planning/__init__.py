"""Memory and time of a run that has not started, for a plan.

footprint.py        by arithmetic
without_data.py     memory of an update on tensors without data
tensor_memory.py    counts the memory of such tensors
compiled_layers.py  layers as torch.compile would run them, on such tensors
"""
