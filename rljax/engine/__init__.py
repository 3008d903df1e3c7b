"""Engines: what samples, what learns, and how weights get from one to the other.

    interface.py   the protocols: Sampler, Learner, and the Plugin that makes them
    engine.py      the pair of them; publishing
    plugins.py     engines by name: discovery, allocation, checks
    rank.py        one process among those of a learner

A third party needs this package and rljax.testing, nothing else.
"""

from rljax.engine.engine import Engine
from rljax.engine.interface import (
    HostPlugin,
    Learner,
    LendingSampler,
    ManyProcesses,
    Plugin,
    PortablePlugin,
    RecoveringSampler,
    RoutedPlugin,
    Sampler,
    State,
    StreamingSampler,
    WeightSource,
)
from rljax.engine.plugins import (
    allocate,
    build,
    check,
    check_lending,
    find_plugin,
    make_learner,
    memory_backed,
    portable_plugin,
    require_both,
    room_for_prompt,
    scratch,
    transport_of,
)

__all__ = [
    "Engine",
    "HostPlugin",
    "Learner",
    "LendingSampler",
    "ManyProcesses",
    "Plugin",
    "PortablePlugin",
    "RecoveringSampler",
    "RoutedPlugin",
    "Sampler",
    "State",
    "StreamingSampler",
    "WeightSource",
    "allocate",
    "build",
    "check",
    "check_lending",
    "find_plugin",
    "make_learner",
    "memory_backed",
    "portable_plugin",
    "require_both",
    "room_for_prompt",
    "scratch",
    "transport_of",
]
