"""Benchmarks: each a binary that prints a table, next to the peer, in one run."""
