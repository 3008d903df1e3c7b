"""A policy that is one table: logits of the next token given the last.

The whole loop runs on it in milliseconds, for tests.
"""
