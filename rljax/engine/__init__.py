"""Engines: a sampler, a learner, and the transport of weights between them.

    interface.py    what engines are made of: Generator, Sampler, Learner
    cooperative.py  a base class for samplers in the event loop
    weights.py      what a learner is asked to export, and what it returns
    plugin.py       the base class of plugins, which make samplers and learners
    plugins.py      engines by name: discovery, allocation, checks
    engine.py       the pair of sampler and learner; publishing
    storage.py      directory of published files
    rank.py         one process of a learner that lives in several

A third party needs this package and rljax.testing, nothing else: docs/engines.md.
"""

from rljax.engine.cooperative import CooperativeSampler
from rljax.engine.engine import Engine
from rljax.engine.interface import Generator, Learner, PortableState, Sampler
from rljax.engine.plugin import Plugin, check_lending
from rljax.engine.plugins import (
    allocate,
    build,
    check,
    check_devices,
    devices_of,
    find_plugin,
    make_learner,
    make_lone_sampler,
    portable_plugin,
    prepare,
    require_both,
    require_sampler,
    room_for_example,
    room_for_prompt,
    transport_of,
)
from rljax.engine.storage import memory_backed, private_directory, remove_private
from rljax.engine.weights import (
    ExportTarget,
    ExportToDirectory,
    ExportToSampler,
    Post,
    Sender,
    WeightsAtLeader,
    WeightsBroadcast,
    WeightsInDirectory,
    WeightsInMemory,
    WeightSource,
    target_from_json,
)

__all__ = [
    "CooperativeSampler",
    "Engine",
    "ExportTarget",
    "ExportToDirectory",
    "ExportToSampler",
    "Generator",
    "Learner",
    "Plugin",
    "PortableState",
    "Post",
    "Sampler",
    "Sender",
    "WeightSource",
    "WeightsAtLeader",
    "WeightsBroadcast",
    "WeightsInDirectory",
    "WeightsInMemory",
    "allocate",
    "build",
    "check",
    "check_devices",
    "check_lending",
    "devices_of",
    "find_plugin",
    "make_learner",
    "make_lone_sampler",
    "memory_backed",
    "portable_plugin",
    "prepare",
    "private_directory",
    "remove_private",
    "require_both",
    "require_sampler",
    "room_for_example",
    "room_for_prompt",
    "target_from_json",
    "transport_of",
]
