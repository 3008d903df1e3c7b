"""Samplers over HTTP, by SGLang's native protocol: a client of one or more servers, a launcher,
and a server of our own.
"""
