"""Recorded runs on the fake engine, and learners to make their steps again."""

from pathlib import Path

from rljax import loop
from rljax.engines.fake.learner import FakeLearner
from rljax.flight.recording import Recording
from rljax.flight.replayer import Replayer
from rljax.testing.harness import MemorySink, make_run

ASYNC = {"rollout.max_head_offpolicyness": 2, "actor.ppo_n_minibatches": 2}


def train(workdir: Path, overrides, **options):
    """Trains, and returns the run and the sink with its metrics by step; metrics.jsonl has them too.

    Without a live verdict, which would have steps kept.
    """
    sinks = []

    def open_sink(first_step):
        sinks.append(MemorySink(first_step, workdir / "metrics.jsonl"))
        return sinks[-1]

    run = make_run(workdir, {"stats_logger.verdict": False} | overrides, sink=open_sink, **options)
    loop.train(run)
    return run, sinks[-1]


def replayer_of(workdir: Path, **options) -> Replayer:
    """A replayer with the fake engine's learner."""
    return Replayer(Recording(workdir), lambda config: FakeLearner(config, workdir / "model"), **options)
