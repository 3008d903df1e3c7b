"""Benchmarks, one a file; each prints its numbers."""
