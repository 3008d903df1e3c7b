"""Batches: trajectories packed into rows of equal length.

batch.py        the training batch: rows as numpy arrays
packing.py      which trajectory goes into which row, and which row to which rank
compaction.py   leaving out tokens without a gradient before the unembedding sees them
"""
