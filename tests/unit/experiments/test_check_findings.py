"""Findings of `experiments.check` on data, and on a model that it made for itself."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.keys import walk
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.testing.models import make_model
from tests.shared import REPOSITORY


def findings(tmp_path, records, *flags):
    """Returns what check prints. A flag is a key of the config and its value, or as on the command line."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"train_dataset.path": data, "train_dataset.type": "prompt_answer", "valid_dataset.path": ""}
    given |= {"actor.loss": "sft", "warmup.field": "answer"}
    given |= {flag[0]: flag[1] for flag in flags if not isinstance(flag, str)}
    others = [flag for flag in flags if isinstance(flag, str)]
    command = [sys.executable, "-m", "experiments.check", "--config=quickstart"]
    done = subprocess.run(
        [*command, *others, *(f"--config.{key}={value}" for key, value in given.items())],
        capture_output=True, text=True, timeout=200, cwd=REPOSITORY, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_empty_prompts_and_answers_are_told_with_their_place(tmp_path):
    records = [{"prompt": "1+1=", "answer": "2"}, {"prompt": " ", "answer": "2"}, {"prompt": "1+2=", "answer": ""}]
    said = findings(tmp_path, records)
    assert "1 of 3 records have a prompt without text, the first " in said and "train.jsonl:2 (" in said
    assert "1 of 3 records have an empty 'answer', the first " in said and "train.jsonl:3 (" in said


def test_a_system_prompt_that_records_keep_out_is_told_with_their_place(tmp_path):
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    records = [{"prompt": "1+2=", "answer": "3"}, {"messages": own, "answer": "2"}]
    said = findings(tmp_path, records, ("train_dataset.system_prompt", "Be long."))
    assert "1 of 2 records have a system message of their own, the first " in said and "train.jsonl:2 (" in said


def test_whole_numbers_in_a_column_of_floats_are_told_with_the_remedy(tmp_path):
    said = findings(tmp_path, [{"prompt": "1+1=", "answer": 2.0}], ("actor.loss", "ppo"), ("reward.name", "exact"))
    (line,) = [line for line in said.splitlines() if "has floats that are all whole" in line]
    assert "train_dataset" in line and "reward exact wants '2.0', and 2 earns 0" in line and "reward.name=math" in said


def test_an_error_about_a_model_from_scratch_names_no_directory_that_is_gone(tmp_path):
    said = findings(tmp_path, [{"prompt": "1+1=", "answer": "2"}], ("rollout.workflow", "tool_use"))
    (error,) = [line for line in said.splitlines() if "no place for tools" in line]
    assert "the model from scratch (actor.init_from_scratch): the chat template has" in error
    assert "/init" not in said


def test_a_number_that_is_not_finite_is_told_before_a_run(tmp_path):
    """Takes a model that is whole otherwise; without that number, check says that all were read."""
    model_dir = make_model(tmp_path / "model")
    flags = (("actor.path", model_dir), ("actor.init_from_scratch", False))
    records = [{"prompt": "1+1=", "answer": "2"}]
    assert "all numbers finite" in findings(tmp_path, records, *flags)
    arrays = load_file(model_dir / "model.safetensors")
    arrays["model.norm.weight"][-1] = np.nan
    save_file(arrays, model_dir / "model.safetensors")
    said = findings(tmp_path, records, *flags)
    assert "tensor 'model.norm.weight' has NaN or infinity" in said and "not ready: 1 error" in said


def wrong_of(leaf):
    """A value that is no choice of a key, or out of its range; None for a key that has neither."""
    if leaf.key.choices:
        return "zzz"
    return -1 if leaf.key.within is not None else None


def refusal(key, value):
    """The line by which train refuses a value of the quickstart, at its first check of the config."""
    with pytest.raises(UserError) as raised:
        config_checks.check(config_io.changed(config_io.load("quickstart"), [(key, str(value))]))
    return str(raised.value)


def reported(tmp_path, *flags):
    """The findings, as (severity, "part: line"), and what stderr has."""
    said = findings(tmp_path, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}], *flags, "--json")
    return [(each["severity"], f"{each['part']}: {each['line']}") for each in json.loads(said)["findings"]]


def test_every_value_out_of_its_range_is_told_in_the_line_of_train_and_the_rest_is_checked(tmp_path):
    leaves = [(leaf.path, wrong_of(leaf)) for name in ("", "jax") for leaf in walk(JaxConfig() if name else Config(), name)]
    wrong = [(key, value) for key, value in leaves if value is not None]
    said = reported(tmp_path, *wrong)
    assert [line for severity, line in said if severity == "error"] == [refusal(*pair) for pair in wrong]
    parts = [line.partition(":")[0] for severity, line in said if severity == "good"]
    assert {"train_dataset", "reward"} <= set(parts)


@pytest.mark.parametrize(
    "flags",
    [
        [("reward.weights", "1,2")],
        [("reward.name", "exact,exact")],
        [("actor.path", ""), ("actor.init_from_scratch", False)],
        [("train_dataset.limit", 0)],
        [("train_dataset.path", "")],
        [("actor.init.head_dim", 33)],
    ],
    ids=lambda flags: flags[0][0],
)
def test_a_mistake_is_one_error(flags, tmp_path):
    said = reported(tmp_path, ("actor.loss", "ppo"), ("actor.mb_spec.max_tokens_per_row", 64), *flags)
    (error,) = [line for severity, line in said if severity == "error"]
    assert error.startswith(f"{flags[0][0]}: ")
