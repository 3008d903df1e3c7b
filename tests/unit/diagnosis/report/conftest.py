"""A run directory as a run leaves it, made by the fake engine in a second."""

import json
from pathlib import Path

import pytest

from rljax import loop
from rljax.config import io as config_io
from rljax.config.schema import StatsLoggerConfig
from rljax.sinks import Sinks
from rljax.sinks.run_directory import RunDirectory, RunDirectorySink
from rljax.testing.harness import make_run

HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 1">&lt;\u202e\x00'
STEPS = 24


class Hostile:
    """A tokenizer each of whose tokens would break a page that does not escape it."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids):
        return [f"{token}{HOSTILE}" for token in token_ids]


@pytest.fixture(scope="session")
def workdir(tmp_path_factory) -> Path:
    """A finished run of 24 RL steps behind two supervised ones, with evaluations."""
    directory = tmp_path_factory.mktemp("runs") / "trial"
    run_directory = RunDirectory(directory)

    def open_sinks(first_step: int) -> Sinks:
        return Sinks(
            [RunDirectorySink(run_directory, Hostile(), first_step=first_step, logger=StatsLoggerConfig(samples_per_step=3))]
        )

    settings = {
        "total_train_epochs": 8,
        "total_train_steps": STEPS,
        "warmup.steps": 2,
        "evaluator.freq_steps": 4,
        "rollout.max_head_offpolicyness": 1,
        "actor.ppo_n_minibatches": 2,
        "actor.recompute_logprob": True,
    }
    run = make_run(directory, settings, sink=open_sinks)
    run_directory.begin(run.config)
    assert loop.train(run).finished
    run_directory.close()
    assert config_io.from_json((directory / "config.json").read_text()) == run.config
    guard = {
        "step": 9,
        "guard": "max_approx_kl",
        "metric": "x",
        "value": 2.0,
        "bound": 1.0,
        "action": "warn",
        "detail": HOSTILE,
    }
    (directory / "guard.jsonl").write_text(json.dumps(guard) + "\n")
    return directory
