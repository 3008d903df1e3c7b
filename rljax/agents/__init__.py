"""Agents: an OpenAI-compatible endpoint in front of any sampler, and what it records.

An agent is any program that talks to the endpoint: it is given a base URL and an API key, and knows
nothing of training. The workflow "agent" (rljax/workflows/agent.py) runs one per episode.

agent.py       agents as functions and as processes
server.py      the endpoint on a port, for as long as there are sessions
endpoint.py    its routes
parameters.py  bodies of requests, parsed and checked
exchange.py    one request, from its body to recorded turns
dialogue.py    messages to token ids, and sampled ids to a message
stream.py      text of a completion as it grows
replies.py     JSON of replies; errors.py, of errors
session.py     what the requests of an agent are sampled with
recording.py   what was recorded of them; export.py, as trajectories
"""

from rljax.agents.dialogue import Dialogue
from rljax.agents.endpoint import PATHS, Endpoint, Guest
from rljax.agents.recording import STYLES
from rljax.agents.session import SamplingPolicy, Session

__all__ = ["PATHS", "STYLES", "Dialogue", "Endpoint", "Guest", "SamplingPolicy", "Session"]
