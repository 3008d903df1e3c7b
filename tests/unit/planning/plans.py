"""Plans of a config, as tests ask for them."""

import json

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Request, plan

WORKSPACES = "workspaces of matrix products"
ONE_EPISODE = {"train_dataset.batch_size": 1, "gconfig.n_samples": 1}  # so that a minibatch is one micro-batch
LEARNER_ALONE = {"rollout.addr": "host:1"}


def request_of(mode, shape="qwen3-0.6b", topology="h100:8", prompt=512, completion=512, find=find_plugin, **keys):
    pairs = [(name, json.dumps(value) if isinstance(value, bool) else str(value)) for name, value in keys.items()]
    config = io.load("base", [("actor.path", shape), ("train_dataset.path", "task:add"), ("allocation_mode", mode), *pairs])
    return Request(config, shape_of(shape), Topology.parse(topology), find, prompt, completion)


def plan_of(mode, **rest):
    return plan(request_of(mode, **rest))


def learner_of(mode, **rest):
    made = plan_of(mode, **{**rest, **LEARNER_ALONE}).learner
    return made.footprint
