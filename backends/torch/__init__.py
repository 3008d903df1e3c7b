"""Arithmetic in PyTorch: model, losses, log-probs, parallelism, optimizer, checkpoints.

Stateless.
"""
