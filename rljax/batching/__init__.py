"""Batches: trajectories packed into rows of equal length.

batch.py        the training batch: rows as numpy arrays
packing.py      assigns trajectories to rows, and rows to ranks
compaction.py   leaves out tokens that are not trained on before the unembedding
full.py         a batch without padding, for plans
pictures.py     pictures of packed rows as an array
"""
