"""Causal attention over packed rows: one interface, an implementation per kernel, and the choice
between them.

interface.py  what an implementation is: a callable that says what it cannot do
choice.py     the implementation that a run uses
xla.py        plain JAX, for any device, dtype and mask: the reference
cudnn.py      cuDNN, on NVIDIA GPUs from Hopper on
tokamax.py    tokamax, for soft-caps and other GPUs
splash.py     the Pallas kernel of jax for TPUs
"""
