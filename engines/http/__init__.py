"""Samplers over HTTP, by SGLang's native protocol.

A client of one or more servers, a launcher of SGLang servers, and a server of our own.

plugin.py             the engine `http`: servers that run already
config.py             the section `sglang` of the config
client.py             a sampler that is one or more servers
router.py             the server of each request
calls.py              calls that end with an answer, a time limit or the loss of a server
remote.py             one server as the client sees it
health.py             watches servers, restarts ours, readmits those that recover
protocol.py           the JSON of SGLang's protocol
replies.py            a streamed reply put together
continuation.py       a completion of several replies, for streams that broke
publishing.py         weights to servers, by a directory or a broadcast
published_weights.py  the last weights, kept for servers that restart
interfaces.py         what the client, the watch and the processes ask of each other
launcher.py           starts SGLang servers; reaper.py ends them with their parent
server.py             our own server, for any sampler
generation.py         one request there
access.py             who may ask it for what
"""
