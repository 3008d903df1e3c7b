"""Messages between processes and on disk: one framing, one handshake, one way to listen.

framing.py     encodes and decodes messages: on sockets, asyncio streams and in files
handshake.py   both sides of a connection prove that they know a token, which is never sent
listener.py    accepts connections and passes on those that completed the handshake
token.py       the secret that servers of a user ask for
rate_limit.py  log lines that strangers cause, at most one a minute
web_server.py  serves an aiohttp application, with few connections that have not shown a token

Used by rollout workers (rljax/workers), the ranks of a learner (rljax/multiprocess) and the journal
(rljax/rollout/journal.py); web_server.py by servers of samplers and agents' endpoints.
"""
