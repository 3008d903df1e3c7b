"""Benchmarks, one per file; each prints its numbers."""
