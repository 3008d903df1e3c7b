"""Config files, overrides and config.json: what is accepted means what it says, everything else is
one clear line.
"""

import copy
import dataclasses
import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.configs import base
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError


def read(*overrides: str) -> Config:
    """The base config with `key=text` overrides, as a binary reads it."""
    tree = base.get_config().to_dict()
    for override in overrides:
        key, _, text = override.partition("=")
        config_io.apply_override(tree, key, text)
    return config_io.from_dict(tree)


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        read(*overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


def changed(config: Config, **sections: dict) -> Config:
    parts = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **parts)


def complete() -> ConfigDict:
    """The base config with the section of every engine that has one."""
    config = base.get_config()
    assert "jax" in config and "fsdp" in config and "sglang" in config
    return config


def test_base_config_is_complete_and_round_trips():
    config = config_io.from_dict(base.get_config())
    assert config_io.from_json(config_io.to_json(config)) == config


@given(st.sets(st.sampled_from(config_io.leaves()), max_size=3))
def test_round_trip_after_any_change_of_type_preserving_values(keys):
    tree = complete().to_dict()
    for key in keys:
        *path, leaf = key.split(".")
        section = tree
        for name in path:
            section = section[name]
        value = section[leaf]
        section[leaf] = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else value
    config = config_io.from_dict(tree)
    assert config_io.from_json(config_io.to_json(config)) == config


def test_misspelled_key_is_refused_with_the_nearest():
    assert refusal("actor.eps_clip_highr=0.3") == "actor.eps_clip_highr: no such key (did you mean eps_clip_higher)"


def test_misspelled_key_in_a_config_file_too(tmp_path: Path):
    file = tmp_path / "typo.py"
    file.write_text(
        textwrap.dedent("""
        from rljax.configs import base
        def get_config():
            config = base.get_config()
            config.actor.eps_clip_highr = 0.3
            return config
    """)
    )
    with pytest.raises(
        UserError, match=rf"^--config: {file}: actor.eps_clip_highr: no such key \(did you mean eps_clip_higher\)$"
    ):
        config_io.load(str(file))


def test_a_key_of_another_section_is_found_by_its_last_word():
    assert "did you mean gconfig.temperature or evaluator.temperature" in refusal("actor.temperature=1.0")
    assert refusal("actor.lr=1e-5") == "actor.lr: no such key (did you mean actor.optimizer.lr)"  # not lora
    assert refusal("actor.lrr=1e-5") == "actor.lrr: no such key (did you mean actor.optimizer.lr)"


def test_a_key_without_a_value_is_true_of_a_bool_and_refused_of_others():
    tree = base.get_config().to_dict()
    config_io.apply_override(tree, "gconfig.greedy", None)
    assert config_io.from_dict(tree).gconfig.greedy is True
    for key in ("train_dataset.path", "saver.freq_steps", "rollout.should_accept_fn", "rollout.workflow_args.a"):
        with pytest.raises(UserError, match=rf"^{key}: needs a value \(--config\.{key}=VALUE\)$"):
            config_io.apply_override(tree, key, None)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=x", "seed: expected an integer, got 'x'"),
        ("seed=1.5", "seed: expected an integer, got '1.5'"),
        ("seed=None", "seed: expected an integer, got 'None'"),
        ("actor.eps_clip=high", "actor.eps_clip: expected a number, got 'high'"),
        ("actor.c_clip=high", "actor.c_clip: expected a number or None, got 'high'"),
        ("actor.eps_clip=nan", "actor.eps_clip: must be a finite number, not nan"),
        ("gconfig.greedy=yes", "gconfig.greedy: expected true or false, got 'yes'"),
        ("gconfig.stop_token_ids=a", "gconfig.stop_token_ids[0]: expected an integer, got 'a'"),
        ("gconfig.stop=(1,)", "gconfig.stop[0]: expected a string, got 1"),
        ("seed.x=1", "seed.x: seed is a value, not a section"),
        ("saver=1", "saver: a section; set one of its keys: "),
    ],
)
def test_wrong_types_are_refused(override, expected):
    assert refusal(override).startswith(expected)


def test_a_text_where_a_list_is_wanted_is_not_split_into_characters(tmp_path: Path):
    assert read("gconfig.stop=</s>").gconfig.stop == ("</s>",)
    assert refusal("gconfig.stop=('</s>')") == "gconfig.stop: expected a list, each entry a string, got '</s>'"
    file = tmp_path / "text.py"
    file.write_text(
        "from rljax.configs import base\n"
        "def get_config(kind):\n"
        "    config = base.get_config()\n"
        "    config = config.to_dict() if kind == 'dict' else config\n"
        "    config['gconfig']['stop'] = '</s>'\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=r"^gconfig\.stop: expected a list, each entry a string, got '</s>'$"):
        config_io.load(f"{file}:dict")
    with pytest.raises(UserError, match=r"text\.py:5: TypeError: .*</s>"):
        config_io.load(f"{file}:ConfigDict")


def test_types_are_not_coerced_from_python():
    for key, value in [("seed", True), ("seed", 2.0), ("seed", "2"), ("allocation_mode", 1), ("deterministic", 1)]:
        tree = base.get_config().to_dict() | {key: value}
        with pytest.raises(UserError, match=f"^{key}: expected"):
            config_io.from_dict(tree)


def test_missing_key():
    tree = base.get_config().to_dict()
    del tree["actor"]["optimizer"]["lr"]
    with pytest.raises(UserError, match=r"^actor\.optimizer\.lr: missing"):
        config_io.from_dict(tree)


@pytest.mark.parametrize(
    ("override", "get", "expected"),
    [
        ("actor.eps_clip=1", lambda c: c.actor.eps_clip, 1.0),  # an integer where a float is wanted
        ("actor.optimizer.lr=3e-4", lambda c: c.actor.optimizer.lr, 3e-4),
        ("actor.behav_imp_weight_cap=None", lambda c: c.actor.behav_imp_weight_cap, None),
        ("rollout.consumer_batch_size=16", lambda c: c.rollout.consumer_batch_size, 16),
        ("gconfig.stop=('a,b','\\n')", lambda c: c.gconfig.stop, ("a,b", "\n")),
        ("gconfig.stop=a,b", lambda c: c.gconfig.stop, ("a", "b")),
        ("gconfig.stop=", lambda c: c.gconfig.stop, ()),
        ("gconfig.stop_token_ids=[1,2]", lambda c: c.gconfig.stop_token_ids, (1, 2)),
        ("gconfig.stop_token_ids=1", lambda c: c.gconfig.stop_token_ids, (1,)),
        ("stats_logger.live=false", lambda c: c.stats_logger.live, False),
        ("train_dataset.path=1", lambda c: c.train_dataset.path, "1"),  # a string stays one
        ("train_dataset.task.max_operand=20", lambda c: c.train_dataset.task, {"max_operand": 20}),
        ("train_dataset.task.a.b=x", lambda c: c.train_dataset.task, {"a": {"b": "x"}}),
        ("train_dataset.task={'n': (1, 2)}", lambda c: c.train_dataset.task, {"n": [1, 2]}),
    ],
)
def test_overrides_are_read_by_the_schema(override, get, expected):
    value = get(read(override))
    assert value == expected
    assert type(value) is type(expected)


def test_last_override_wins():
    assert read("seed=3", "seed=4").seed == 4


def test_alias_wins_over_the_default_under_the_usual_name(tmp_path: Path):
    assert read().actor.recompute_logprob is True
    assert read("actor.recompute_logprobs=false").actor.recompute_logprob is False
    config = base.get_config()
    config.actor.recompute_logprobs = False
    assert config_io.from_dict(config).actor.recompute_logprob is False


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n", "defines no get_config"),
        ("def get_config():\n    return 1\n", "returns int, not a ConfigDict"),
        ("def get_config(:\n", ":1: SyntaxError"),
        ("def get_config():\n    return 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all\n", ":1: ModuleNotFoundError"),
    ],
)
def test_broken_config_files_are_one_line(tmp_path: Path, source, expected):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(UserError) as raised:
        config_io.load(str(file))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_such_file():
    with pytest.raises(UserError, match=r"^--config: no such file: nowhere\.py"):
        config_io.load("nowhere.py")


def test_file_with_an_argument(tmp_path: Path):
    file = tmp_path / "sweep.py"
    file.write_text(
        "from rljax.configs import base\n"
        "def get_config(seed):\n    config = base.get_config()\n    config.seed = int(seed)\n    return config\n"
    )
    assert config_io.load(f"{file}:17").seed == 17
    assert config_io.load(f"{file}:17", [("seed", "18")]).seed == 18


def test_resolve_fills_what_other_keys_say_and_keeps_what_is_set():
    config = changed(read(), rollout={"max_head_offpolicyness": 3}, train_dataset={"batch_size": 5})
    resolved = config_io.resolve(config)
    assert resolved.rollout.consumer_batch_size == 5
    assert resolved.rollout.max_concurrent_rollouts == (3 + 1) * 5
    assert resolved.actor.eps_clip_higher == config.actor.eps_clip
    assert resolved.actor.loss_aggregation_constant == config.gconfig.max_new_tokens
    assert config_io.resolve(resolved) == resolved
    kept = changed(config, rollout={"consumer_batch_size": 2, "max_concurrent_rollouts": 7}, actor={"eps_clip_higher": 0.0})
    again = config_io.resolve(kept)
    assert (again.rollout.consumer_batch_size, again.rollout.max_concurrent_rollouts) == (2, 7)
    assert again.actor.eps_clip_higher == 0.0


@pytest.mark.parametrize("value", [None, 3])
def test_values_that_follow_others_are_the_same_before_and_after_they_are_written_down(value):
    """Parts of the loop read the same values from a config that no binary has resolved."""
    config = changed(
        read("rollout.max_head_offpolicyness=1", "gconfig.max_new_tokens=9"),
        rollout={"consumer_batch_size": value, "max_concurrent_rollouts": value},
        actor={"eps_clip_higher": value and 0.0, "loss_aggregation_constant": value},
    )
    for read_from in (config, config_io.resolve(config)):
        size = value or config.train_dataset.batch_size
        assert (read_from.batch_size, read_from.max_in_flight) == (size, value or 2 * size)
        assert (read_from.clip_high, read_from.aggregation_constant) == (0.0 if value else config.actor.eps_clip, value or 9)


def test_a_copy_of_the_base_config_is_one():
    config = base.get_config()
    config.jax.slots = 3
    for copied in (copy.deepcopy(config), config.copy_and_resolve_references()):
        copied.jax.slots += 1
        assert JaxConfig.of(config_io.from_dict(copied)).slots == 4 and config.jax.slots == 3


def test_config_json_is_plain_json():
    tree = json.loads(config_io.to_json(read()))
    assert tree["actor"]["eps_clip"] == read().actor.eps_clip
