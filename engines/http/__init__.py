"""Samplers over HTTP, by SGLang's native protocol.

A client of one or more servers, a launcher of SGLang servers, and a server of our own.
"""
