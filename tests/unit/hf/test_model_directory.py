"""The model that a run starts from: given, or made whole or not at all."""

import dataclasses
import json

import pytest

from rljax.config import io as config_io
from rljax.config.schema import ActorConfig
from rljax.configs import quickstart
from rljax.errors import UserError
from rljax.hf.model_directory import prepare_model_directory
from rljax.hf.tokenizer import load_tokenizer


def actor(**changes) -> ActorConfig:
    return dataclasses.replace(config_io.from_dict(quickstart.get_config()).actor, **changes)


def files(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_made_on_the_spot_from_the_seed_and_then_left_alone(tmp_path):
    first = prepare_model_directory(actor(), tmp_path / "a" / "init", seed=1)
    assert first == tmp_path / "a" / "init"
    made = files(first)
    assert files(prepare_model_directory(actor(), tmp_path / "b" / "init", seed=1)) == made
    assert files(prepare_model_directory(actor(), tmp_path / "c" / "init", seed=2)) != made
    assert files(prepare_model_directory(actor(), first, seed=2)) == made  # it is there: a resumed run starts from the same
    tokenizer = load_tokenizer(first)
    config = json.loads((first / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocab_size and config["eos_token_id"] in tokenizer.eos_token_ids


def test_a_half_made_model_of_a_killed_run_is_made_again(tmp_path):
    expected = files(prepare_model_directory(actor(), tmp_path / "whole" / "init", seed=1))
    half = tmp_path / "killed" / ".init.tmp"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"torn")
    assert files(prepare_model_directory(actor(), tmp_path / "killed" / "init", seed=1)) == expected
    assert not half.exists()


def test_with_the_tokenizer_of_another_directory(tmp_path):
    source = prepare_model_directory(actor(), tmp_path / "source", seed=1)
    init = dataclasses.replace(actor().init, tokenizer=str(source))
    copy = prepare_model_directory(actor(init=init), tmp_path / "copy", seed=1)
    assert load_tokenizer(copy).encode("12+34=") == load_tokenizer(source).encode("12+34=")


def test_missing_directories_are_named(tmp_path):
    with pytest.raises(UserError, match=r"^actor.path: no config.json in .*nowhere"):
        prepare_model_directory(actor(init_from_scratch=False, path=str(tmp_path / "nowhere")), tmp_path / "init", seed=1)
    init = dataclasses.replace(actor().init, tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"^actor.init.tokenizer: no tokenizer in .*nowhere"):
        prepare_model_directory(actor(init=init), tmp_path / "init", seed=1)
    assert not (tmp_path / "init").exists()
