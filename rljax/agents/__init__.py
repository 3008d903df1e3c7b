"""Agents: an OpenAI-compatible endpoint in front of any sampler, and what it records.

An agent is any program that talks to the endpoint: it is given a base URL and an API key, and knows
nothing of training. The workflow "agent" (rljax/workflows/agent.py) runs one per episode.
"""

from rljax.agents.dialogue import Dialogue
from rljax.agents.endpoint import PATHS, Endpoint, Guest
from rljax.agents.recording import STYLES
from rljax.agents.session import SamplingPolicy, Session

__all__ = ["PATHS", "STYLES", "Dialogue", "Endpoint", "Guest", "SamplingPolicy", "Session"]
