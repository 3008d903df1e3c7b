"""Refusals of `train` at its start, which `check` says before: each key of the schema with a wrong
value.

Each binary runs in a process of its own, with the same values one after the other.
"""

import json
import os
import subprocess
import sys
import typing

import pytest
from safetensors.numpy import save_file

from rljax.config import io as config_io
from rljax.config.keys import unwrap_optional, walk
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from tests.shared import REPOSITORY

# Start of both: configs from (key, value) pairs, and the error of an action as one line
COMMON = """
import json, pathlib, sys
from rljax.config import io as config_io
from rljax.errors import UserError

def line_of(action):
    try:
        action()
    except UserError as error:
        return str(error)

folder, cases = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
base = config_io.from_json((folder / "base.json").read_text())
"""
TRAIN = """
from rljax.experiments import main, train

class Started(Exception):
    pass

def starts(*_):
    raise Started

train._build_engine = starts  # whatever comes before it is the start of a run
for number, case in enumerate(cases):
    def start():
        try:
            train.run(config_io.changed(base, case), lambda: folder / f"run{number}")
        except Started:
            pass
    line = line_of(start)
    print(json.dumps(line and main.without_scratch(line, folder / f"run{number}")), flush=True)
"""
CHECK = """
from rljax.experiments import check, main

main.FLAGS(["check"])
for number, case in enumerate(cases):
    scratch = folder / f"scratch{number}"
    scratch.mkdir(exist_ok=True)
    found = []
    def checks():
        found.extend(check.Checks(config_io.changed(base, case), scratch).run())
    line = line_of(checks)
    print(json.dumps([line] if line else [str(each) for each in found if each.severity == "error"]), flush=True)
"""


def wrong_text(leaf):
    """A text that no key with neither choices nor a range asks for, in its type; None for others."""
    _, kind = unwrap_optional(leaf.type)
    if leaf.key.choices or leaf.key.within is not None:
        return None
    if kind is str:
        return "zzz"
    if typing.get_origin(kind) is tuple:
        return "('zzz',)" if typing.get_args(kind)[0] is str else "(-1,)"
    return "{'zzz': 1}" if typing.get_origin(kind) is dict else None


def said(script, folder, cases):
    """Runs one of the scripts. Returns what it prints for each case."""
    command = [sys.executable, "-c", COMMON + script, str(folder), json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, cwd=REPOSITORY, env=os.environ | {"XDG_CACHE_HOME": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"', "null"))]


@pytest.fixture
def folder(tmp_path):
    """A directory with base.json: the quickstart on a small file, without warm-up."""
    data = tmp_path / "train.jsonl"
    records = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = {"train_dataset.path": data, "train_dataset.type": "prompt_answer", "warmup.steps": 0, "actor.init.hidden_size": 16}
    keys |= {"valid_dataset.path": "", "evaluator.freq_steps": None, "reward.workers": 1}
    config = config_io.changed(config_io.load("quickstart"), [(key, str(value)) for key, value in keys.items()])
    (tmp_path / "base.json").write_text(config_io.to_json(config))
    return tmp_path


@pytest.mark.slow
def test_check_says_what_train_ends_with_for_a_wrong_text_in_any_key(folder):
    leaves = [*walk(Config()), *walk(JaxConfig(), "jax")]
    cases = [[(leaf.path, wrong_text(leaf))] for leaf in leaves if wrong_text(leaf) is not None]
    refused = said(TRAIN, folder, cases)
    found = said(CHECK, folder, cases)
    assert len(refused) == len(found) == len(cases)
    untold = {
        case[0][0]: (line, lines) for case, line, lines in zip(cases, refused, found, strict=True) if line not in (*lines, None)
    }
    assert not untold
    assert sum(line is not None for line in refused) > 10


def test_check_says_what_train_ends_with_for_what_is_not_here(folder):
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 16.0}))
    save_file({}, adapter / "adapter_model.safetensors")
    cases = [
        [("actor.lora.rank", "8"), ("actor.lora.path", str(adapter))],
        [("actor.lora.rank", "4"), ("actor.lora.path", str(folder / "nothing"))],
        [("rollout.listen", "zzz")],
        [("actor.distill.teacher", "zzz")],
        [("train_dataset.batch_size", "9"), ("total_train_epochs", "1")],  # of 8 prompts
        [("rollout.consumer_batch_size", "17"), ("total_train_epochs", "2")],
        [("train_dataset.batch_size", "9"), ("total_train_epochs", "1"), ("actor.loss", "sft"), ("warmup.field", "answer")],
    ]
    *found, (devices,) = said(CHECK, folder, [*cases, [("allocation_mode", "jax:d64+jax:d64")]])
    assert all(line is not None and line in lines for line, lines in zip(said(TRAIN, folder, cases), found, strict=True))
    assert not any(said(CHECK, folder, [[("train_dataset.batch_size", "8"), ("total_train_epochs", "1")]]))
    assert devices.startswith("allocation_mode: jax:d64 needs devices 64 to 127, but there are ")  # the learner's error


def test_both_warn_of_exact_with_worked_solutions(folder):
    records = [{"question": f"{a} and 1?", "answer": f"{a} and 1 are {a + 1}.\n#### {a + 1}"} for a in range(9)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ["--config.train_dataset.type=gsm8k", f"--config.train_dataset.path={folder / 'train.jsonl'}"]
    flags += ["--config.warmup.steps=0", "--config.evaluator.freq_steps=None", "--config.valid_dataset.path="]
    flags += ["--config.total_train_steps=0", "--config.jax.context_length=64", "--config.allocation_mode=fake:d1"]
    workdir = [f"--workdir={folder / 'run'}", "--config.saver.export_final=False"]
    for binary, reward, more in (("check", "exact", []), ("check", "gsm8k", []), ("train", "exact", workdir)):
        command = [sys.executable, "-m", f"experiments.{binary}", "--config=quickstart", *flags, *more]
        done = subprocess.run(
            [*command, f"--config.reward.name={reward}"], capture_output=True, text=True, timeout=200, cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told = [line for line in (done.stdout + done.stderr).splitlines() if "is a worked solution" in line]
        assert bool(told) == (reward == "exact") and all("warning" in line and "9 of 9" in line for line in told)
