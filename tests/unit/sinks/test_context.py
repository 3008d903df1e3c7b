"""The context of a run: one session per process, with what decides the results."""

import dataclasses
import functools
import json
import subprocess
import sys
import tempfile

import numpy
import pytest

import rljax
from rljax.errors import UserError
from rljax.evaluation.protocol import protocol_of
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.sinks import context
from rljax.sinks.run_directory import RunDirectory
from rljax.testing.harness import make_config
from rljax.types import Prompt


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "weights").write_bytes(bytes(3 << 20))
    return directory


PROMPT = Prompt("0/1", ({"role": "user", "content": "3+4="},), {})


@functools.cache
def tokenizer():
    with tempfile.TemporaryDirectory() as directory:
        build_char_tokenizer(directory)
        return load_tokenizer(directory)


def session(model_dir, *, overrides=None, sets=("",), first_step=0):
    config = make_config(overrides)
    protocol = protocol_of(config, config.valid_dataset, prompts=[PROMPT] * 7, data={"data": "e"}, tokenizer=tokenizer())
    protocols = dict.fromkeys(sets, protocol)
    return context.session(
        config, first_step=first_step, model_dir=model_dir, data={"data": "d"}, protocols=protocols, devices=["NVIDIA H200"]
    )


def test_a_run_that_goes_on_adds_a_session(tmp_path, model_dir):
    run = RunDirectory(tmp_path / "run")
    first, second = session(model_dir), session(model_dir, first_step=12)
    context.append(run, first)
    context.append(run, second)
    sessions = json.loads((run.path / "context.json").read_text())["sessions"]
    assert [one["first_step"] for one in sessions] == [0, 12]
    assert sessions[0] == json.loads(json.dumps(dataclasses.asdict(first)))


def test_it_names_the_versions_and_the_machine_that_run(model_dir):
    found = session(model_dir)
    assert found.rljax == rljax.__version__ and found.packages["numpy"] == numpy.__version__
    assert found.packages["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.hardware.cores >= 1 and found.hardware.devices == ("NVIDIA H200",)
    assert found.data == {"data": "d"} and found.evaluation.data == {"data": "e"}


def test_weights_of_rewards_are_of_the_protocol(model_dir):
    several = {"reward.name": "exact,math", "reward.weights": (1.0, 0.5)}
    assert session(model_dir, overrides=several).evaluation.reward == "exact,math weighted 1, 0.5"
    assert session(model_dir).evaluation.reward == "exact"


def test_the_protocol_is_the_evaluators(model_dir):
    overrides = {"evaluator.temperature": 0.5, "evaluator.n_samples": 3, "evaluator.greedy": False}
    protocol = session(model_dir, overrides=overrides).evaluation
    assert (protocol.prompts, protocol.temperature, protocol.n_samples, protocol.greedy) == (7, 0.5, 3, False)
    assert protocol.split == "test" and session(model_dir, sets=()).evaluation is None
    assert session(model_dir, sets=("", "math")).evaluations["math"] == session(model_dir).evaluation


def test_another_config_or_another_model_has_another_digest(model_dir):
    before = session(model_dir)
    assert session(model_dir, overrides={"seed": 2}).config != before.config == session(model_dir).config
    assert session(model_dir).model == before.model
    with (model_dir / "weights").open("rb+") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert session(model_dir).model != before.model


def test_the_commit_is_the_checkouts(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@e")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "rljax").mkdir()
    source = tmp_path / "rljax" / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(rljax, "__file__", str(source))
    assert context._checkout() == (None, None)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit, dirty = context._checkout()
    assert len(commit) == 40 and dirty is False
    source.write_text("changed")
    assert context._checkout() == (commit, True)


def test_a_file_that_is_no_context_is_named(tmp_path, model_dir):
    run = RunDirectory(tmp_path / "run")
    (run.path / "context.json").write_text("[1]")
    with pytest.raises(UserError, match=r"^--workdir: .*context.json: .*\(delete it to go on\)"):
        context.append(run, session(model_dir))
