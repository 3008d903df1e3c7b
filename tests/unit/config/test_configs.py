"""Config files are sound, say their command, and give the algorithm they are named for."""

import runpy
from pathlib import Path

import pytest

from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[3]
# Those of configs/bench are completed by the binaries they belong to.
FILES = [
    file
    for file in sorted((REPOSITORY / "configs").rglob("*.py"))
    if file.name not in ("__init__.py", "base.py") and file.parent.name != "bench"
]
ALGORITHMS = {"ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "distill", "sft"}


def load(name: str) -> Config:
    return config_io.load(str(REPOSITORY / "configs" / f"{name}.py"))


def algorithm(name: str) -> Config:
    return load(f"algorithms/{name}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_file_is_sound_and_says_its_command(file):
    config_checks.check(config_io.load(str(file)))
    location = file.relative_to(REPOSITORY)
    docstring = runpy.run_path(str(file))["__doc__"]
    assert f"python -m experiments.train --config={location} --workdir=runs/{file.stem}" in docstring


def test_every_algorithm_has_its_file():
    assert {file.stem for file in FILES if file.parent.name == "algorithms"} == ALGORITHMS


def test_algorithms_differ_from_the_quickstart_in_what_they_are():
    """Data, model, warm-up and evaluation are the quickstart's, so that the curves compare."""
    quickstart = load("quickstart")
    for name in ALGORITHMS:
        config = algorithm(name)
        assert (config.actor.init, config.valid_dataset) == (quickstart.actor.init, quickstart.valid_dataset)
        assert name == "sft" or config.warmup == quickstart.warmup
        if name == "sft":  # it samples nothing
            continue
        samples = config.batch_size * config.gconfig.n_samples
        assert samples == quickstart.train_dataset.batch_size * quickstart.gconfig.n_samples
        assert config.actor != quickstart.actor


def test_quickstart_is_asynchronous_and_decoupled():
    config = load("quickstart")
    assert config.rollout.max_head_offpolicyness == 2 and config.actor.use_decoupled_loss and config.warmup.steps > 0
    assert config.train_dataset.split != config.valid_dataset.split
