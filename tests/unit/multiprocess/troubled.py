"""A third party's engine, `troubled`: the fake one, of which one process does something wrong in
its third update.

TROUBLE says what: raise, hang, refuse (as a user's mistake), start (it never comes up), die.
Nothing when it is not set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rljax.engine import Plugin
from rljax.engine.rank import from_environment
from rljax.engines.fake.collective import Alone, Collective
from rljax.engines.fake.learner import FakeLearner
from rljax.engines.fake.plugin import FakePlugin
from rljax.errors import UserError

CULPRIT, UPDATE = 1, 3


class TroubledLearner(FakeLearner):
    updates = 0

    def update(self, batch):
        self.updates += 1
        if self._peers.rank == CULPRIT and self.updates == UPDATE:
            trouble = os.environ.get("TROUBLE")
            if trouble == "raise":
                raise KeyError("no such weight")
            if trouble == "refuse":
                raise UserError("actor.path: this host has no such file")
            if trouble == "hang":
                time.sleep(1000)
            if trouble == "die":
                print("last words", flush=True)
                os._exit(7)
        return super().update(batch)


class TroubledPlugin(FakePlugin):
    def make_learner(self, config, pool, model_dir):
        process = from_environment()
        return TroubledLearner(config, model_dir, Collective(process) if process.size > 1 else Alone())


PLUGIN = TroubledPlugin()


class LonelyPlugin(Plugin):
    """Knows nothing of ranks."""

    samples, learns, transports = True, True, ("memory", "directory")

    def make_sampler(self, config, pool, model_dir):
        return PLUGIN.make_sampler(config, pool, model_dir)

    def make_learner(self, config, pool, model_dir):
        return FakeLearner(config, model_dir)


LONELY = LonelyPlugin()

EARLY = f"""import os, sys
if os.environ.get("TROUBLE") == "start" and os.environ.get("RANK") == "{CULPRIT}":
    print("no driver was found", file=sys.stderr)
    os._exit(9)
"""


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH on which the engines `troubled` and `lonely` are installed."""
    here = Path(__file__)
    (folder / "troubled-1.0.dist-info").mkdir(parents=True)
    (folder / "troubled-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: troubled\nVersion: 1.0\n")
    points = "[rljax.engines]\ntroubled = troubled_engine:PLUGIN\nlonely = troubled_engine:LONELY\n"
    (folder / "troubled-1.0.dist-info" / "entry_points.txt").write_text(points)
    (folder / "troubled_engine.py").write_text(here.read_text())
    (folder / "sitecustomize.py").write_text(EARLY)
    (folder / "lengths.py").write_text("def reward(prompt, completion):\n    return len(completion) % 3\n")
    return folder
