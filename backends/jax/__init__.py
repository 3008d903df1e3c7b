"""Arithmetic in JAX: model, losses, log-probs, sharding, optimizer, checkpoints. Stateless."""
