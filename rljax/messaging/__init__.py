"""Messages between processes, and on disk: one framing, one handshake, one way to listen.

framing.py     a message as bytes, and back: for sockets, asyncio streams and files
handshake.py   both sides of a connection prove that they know a token, which never travels
listener.py    accepts connections, and hands over those that passed the handshake

Rollout workers (rljax/workers), ranks of a learner (rljax/multiprocess) and the journal
(rljax/rollout/journal.py) use it.
"""
