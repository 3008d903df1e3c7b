"""An engine whose policy is one table: the logits of the next token, given the last.

The whole loop runs on it in milliseconds, for tests.
"""
