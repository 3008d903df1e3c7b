"""Environments: worlds in which a policy acts by text, over several turns.

    interface.py      what users implement: reset and step
    build.py          environments by name, and the source of an episode that a prompt carries
    agent.py          an agent that plays it over OpenAI's API
    play.py           one episode: calls with time limits, return values checked
    tasks.py          prompts that begin episodes: task:environment/NAME
    guess_number.py   the smallest environment of several turns
    gymnasium.py      environments of this package; so reasoning_gym.py and verifiers.py
    checks.py         contract of an environment, before it is trained on
    baselines.py      what a random policy and a simple expert earn in it

The workflow is rljax/workflows/environment.py.
"""

from rljax.environments.build import ENVIRONMENTS, Source, make_environment
from rljax.environments.interface import Baselines, Environment, Message, Observation, Step
from rljax.environments.play import Play, numbers_of

__all__ = [
    "ENVIRONMENTS",
    "Baselines",
    "Environment",
    "Message",
    "Observation",
    "Play",
    "Source",
    "Step",
    "make_environment",
    "numbers_of",
]
