"""Stateless arithmetic in PyTorch: model, losses, log-probs, parallelism, optimizer, checkpoints."""
