"""A YAML of AReaL's becomes a config of ours: key by key, in older spellings, and as a whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from absl import logging

from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.allocation import parse
from rljax.config.foreign import areal
from rljax.config.foreign.areal_keys import OURS, READ, REPEATED, SAME
from rljax.engine import find_plugin
from rljax.engines.http.config import SglangConfig
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.testing.models import make_model
from tests.shared import REPOSITORY

YAML = Path(__file__).with_name("areal_gsm8k.yaml")
SFT = Path(__file__).with_name("areal_sft.yaml")


def value_at(config, key):
    """The value of a dotted key, of an engine's section too."""
    value = config_io.to_dict(config)
    for name in key.split("."):
        value = value[name]
    return value


@pytest.fixture
def variant(tmp_path):
    """The file with keys set (None and a name of a section takes it out), converted."""

    def convert(**changes):
        tree = yaml.safe_load(YAML.read_text())
        for key, value in changes.items():
            *sections, leaf = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
            if value is OUT:
                del branch[leaf]
            else:
                branch[leaf] = value
        path = tmp_path / "variant.yaml"
        path.write_text(yaml.safe_dump(tree))
        return config_io.load(str(path))

    return convert


OUT = object()  # in place of a value: no such key


def test_each_key_lands_on_ours():
    config = config_io.load(str(YAML))
    config_checks.check(config)
    actor, optimizer = config.actor, config.actor.optimizer
    assert config.allocation_mode == "sglang:d1p1t1+fsdp:d1p1t1"
    assert (config.seed, config.total_train_epochs, config.total_train_steps) == (3, 1, 2)
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, config.gconfig.temperature) == (3, 24, 0.7)
    assert (config.gconfig.top_k, config.gconfig.stop) == (0, ())
    sglang = SglangConfig.of(config)
    assert (config.rollout.max_concurrent_rollouts, config.rollout.consumer_batch_size) == (8, 2)
    assert config.rollout.max_head_offpolicyness == 2
    assert (actor.path, actor.dtype, actor.gradient_checkpointing) == ("Qwen/Qwen2.5-1.5B-Instruct", "bfloat16", "full")
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay, optimizer.eps) == ("adamw", 2.5e-5, 0.03, 1e-8)
    assert (optimizer.beta2, optimizer.gradient_clipping, optimizer.warmup_steps_proportion) == (0.99, 1.5, 0.001)
    assert (actor.mb_spec.max_tokens_per_row, actor.eps_clip, actor.reward_scaling, actor.reward_bias) == (256, 0.4, 10.0, -0.5)
    assert (actor.kl_ctl, actor.ppo_n_minibatches, actor.adv_estimator) == (0.0, 1, "grpo")
    assert actor.use_decoupled_loss and actor.recompute_logprob
    assert (actor.behav_imp_weight_cap, actor.behav_imp_weight_mode, actor.behav_imp_weight_level) == (4.0, "mask", "token")
    assert (actor.reward_norm.mean_level, actor.reward_norm.std_level) == ("group", "group")
    assert (actor.adv_norm.mean_level, actor.adv_norm.std_level) == ("batch", "batch")
    assert config.deterministic
    assert (config.train_dataset.path, config.train_dataset.type, config.reward.name) == (
        "openai/gsm8k",
        "areal_gsm8k",
        "gsm8k",
    )
    assert (config.valid_dataset.split, config.valid_dataset.shuffle, config.train_dataset.max_length) == ("test", False, 96)
    assert (config.evaluator.n_samples, config.evaluator.temperature, config.evaluator.greedy) == (3, 0.7, False)
    assert (config.evaluator.freq_epochs, config.saver.freq_epochs, config.saver.freq_steps) == (1, 1, None)
    assert (sglang.dtype, sglang.context_length, sglang.mem_fraction_static) == ("bfloat16", 32768, 0.8)
    assert sglang.extra_args == ("--disable-radix-cache", "--chunked-prefill-size", "-1")
    assert (config.recover.mode, config.stats_logger.wandb, JaxConfig.of(config).context_length) == ("fresh", False, 96 + 24)


def test_what_is_of_no_use_is_named_once(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *arguments: said.append(text % arguments))
    config_io.load(str(YAML))
    (line,) = said
    for name in (
        "vllm",
        "cluster",
        "ref",
        "rollout.agent",
        "actor.weight_update_mode",
        "train_dataset.pin_memory",
        "recover.freq_secs",
    ):
        assert f" {name}," in line or f" {name} (" in line
    for name in ("gconfig.n_samples", "megatron", "queue_size", "experiment_name", "fileroot", "use_deterministic"):
        assert name not in line


def test_the_checkpoints_of_older_files_are_those_of_recover(variant, caplog):
    """v0.3 had a section of its own for them; what it says once more has to be the same, as elsewhere."""
    names = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}", "fileroot": "${cluster.fileroot}"}
    older = {**names, "freq_epochs": 1, "freq_steps": None, "freq_secs": 3600}
    without = variant()
    caplog.clear()
    assert variant(checkpointer=older) == without
    (line,) = [record.getMessage() for record in caplog.records]
    assert "checkpointer.freq_epochs, checkpointer.freq_secs" in line
    with pytest.raises(
        UserError, match=r"checkpointer\.freq_sec: no such key of AReaL's \(did you mean checkpointer\.freq_secs"
    ):
        variant(checkpointer={"freq_sec": 3})


def test_a_section_with_a_key_that_is_of_use_is_not_named_as_if_it_had_none(variant, caplog):
    useless, used = {"granularity": 4}, {"max_tokens_per_mb": 512}
    for section, name in ((used | useless, "the rest of actor.mb_spec"), (useless, "actor.mb_spec"), (used, None)):
        caplog.clear()
        variant(**{"actor.mb_spec": section, "actor.fsdp": {"offload_params": True}})
        (line,) = [record.getMessage() for record in caplog.records]
        named = line.partition("of no use here: ")[2].removesuffix(" (docs/areal.md)").split(", ")
        assert [n for n in named if n.endswith("actor.mb_spec")] == ([name] if name else [])
        assert "actor.fsdp" in named


def test_silent_keys_have_their_defaults(variant):
    """Missing keys have AReaL's defaults, not those of rljax: the file was written for them."""
    gone = ("optimizer", "eps_clip", "kl_ctl", "ppo_n_minibatches", "use_decoupled_loss", "recompute_logprob", "adv_norm")
    config = variant(**{f"actor.{key}": OUT for key in gone})
    actor = config.actor
    assert (actor.optimizer.lr, actor.optimizer.beta2, actor.eps_clip, actor.kl_ctl) == (1e-3, 0.999, 0.2, 0.1)
    assert (actor.ppo_n_minibatches, actor.use_decoupled_loss, actor.recompute_logprob) == (4, False, False)
    assert (actor.adv_norm.mean_level, actor.kl_estimator, actor.kl_placement, actor.reward_clip) == (
        "none",
        "k1",
        "reward",
        20.0,
    )


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"allocation_mode": "sglang.d4p1t1+d4p1t1"}, "allocation_mode", "sglang.d4p1t1+fsdp:d4p1t1"),
        ({"allocation_mode": "sglang:d2+megatron:d2t2"}, "allocation_mode", "sglang:d2+fsdp:d2t2"),
        ({"allocation_mode": "jax:d1"}, "allocation_mode", "jax:d1"),
        ({"allocation_mode": "jax"}, "allocation_mode", "jax"),
        ({"allocation_mode": "sglang+jax"}, "allocation_mode", "sglang+jax"),
        ({"allocation_mode": "sglang.d4"}, "allocation_mode", "sglang.d4"),
        ({"allocation_mode": "d8p1t1"}, "allocation_mode", "fsdp:d8p1t1"),  # a learner alone
        ({"allocation_mode": "megatron:d8"}, "allocation_mode", "fsdp:d8"),
        ({"allocation_mode": "archon"}, "allocation_mode", "fsdp"),
        ({"rollout.backend": OUT, "actor.backend": "archon:d8"}, "allocation_mode", "fsdp:d8"),
        ({"rollout.backend": OUT, "actor.backend": "fsdp"}, "allocation_mode", "fsdp"),
        ({"actor.backend": None}, "allocation_mode", "sglang:d1p1t1"),
        (
            {"rollout.scheduling_strategy": {"type": "colocation", "target": "actor"}},
            "allocation_mode",
            "sglang:d1p1t1|fsdp:d1p1t1",
        ),
        ({"async_training": False}, "rollout.max_head_offpolicyness", 0),
        ({"actor.rejection_sampling": OUT, "actor.behav_imp_weight_cap": 5.0}, "actor.behav_imp_weight_cap", 5.0),
        ({"actor.rejection_sampling.action": "clamp"}, "actor.behav_imp_weight_mode", "clamp"),
        ({"actor.recompute_logprob": OUT}, "actor.recompute_logprob", True),  # the decoupled loss implies it
        ({"actor.reward_norm": {"mean_level": None, "std_level": None}}, "actor.reward_norm.mean_level", "none"),
        ({"actor.use_lora": True, "actor.lora_rank": 8}, "actor.lora.rank", 8),
        ({"critic": {"path": "somewhere", "ppo_n_minibatches": 2}, "actor.reward_norm": None}, "actor.adv_estimator", "gae"),
        ({"gconfig.stop": "</s>"}, "gconfig.stop", ("</s>",)),  # a text alone, and not its characters
        ({"gconfig.stop": ["</s>", "\n"]}, "gconfig.stop", ("</s>", "\n")),
        ({"gconfig.stop": None}, "gconfig.stop", ()),
        ({"gconfig.stop_token_ids": 151643}, "gconfig.stop_token_ids", (151643,)),
        ({"gconfig.stop_token_ids": [2, 3]}, "gconfig.stop_token_ids", (2, 3)),
        ({"gconfig.stop_token_ids": None}, "gconfig.stop_token_ids", ()),
        ({"actor.use_lora": True, "actor.target_modules": "q_proj"}, "actor.lora.target_modules", ("q_proj",)),
        (
            {"actor.use_lora": True, "actor.target_modules": ["q_proj", "v_proj"]},
            "actor.lora.target_modules",
            ("q_proj", "v_proj"),
        ),
        ({"gconfig.top_k": 100000000}, "gconfig.top_k", 0),
        ({"eval_gconfig": {"temperature": 0.6, "greedy": False}}, "evaluator.temperature", 0.6),
        ({"valid_dataset": None}, "evaluator.freq_epochs", None),
        ({"recover.mode": "auto"}, "recover.mode", "auto"),
        ({"stats_logger.wandb": {"mode": "online", "project": "p"}}, "stats_logger.wandb", True),
        ({"train_dataset.type": "sft"}, "actor.loss", "sft"),
        ({"launcher": {"trainer_cpus_per_gpu": 4}}, "seed", 3),
    ],
)
def test_other_spellings(variant, changes, key, value):
    config = variant(**changes)
    assert value_at(config, key) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.train_batch_size": 8}, r"of AReaL's \(verl's data.train_batch_size is train_dataset.batch_size here"),
        ({"actor.eps_clp": 0.3}, r"actor.eps_clp: no such key of AReaL's \(did you mean actor.eps_clip"),
        ({"gconfig.n_sample": 4}, "gconfig.n_sample: .*did you mean gconfig.n_samples"),
        ({"sglang.mem_fraction": 0.5}, "did you mean sglang.mem_fraction_static"),
        ({"rolout": {"backend": "x"}}, "rolout.backend: no such key of AReaL's"),
        ({"actor.temperature": 0.9}, "actor.temperature: 0.9 is not gconfig.temperature"),
        ({"actor.reward_norm.group_size": 8}, r"actor.reward_norm.group_size: 8 is not gconfig.n_samples \(3\)"),
        ({"ref.path": "another"}, "ref.path: 'another' is not actor.path"),
        ({"actor.use_sapo_loss": True}, "SAPO is not implemented"),
        ({"gconfig.frequency_penalty": 0.5}, "gconfig.frequency_penalty: 0.5 is not 0"),
        ({"actor.optimizer.type": "muon"}, "actor.optimizer.type: 'muon'"),
        ({"actor.rejection_sampling.level": "sequence"}, "geometric mean"),
        ({"actor.rejection_sampling.lower": 0.5}, "actor.rejection_sampling.lower"),
        ({"seed": "${actor.sed}"}, r"\$\{actor.sed\} refers to nothing"),
        ({"seed": "${seed}"}, "refers to itself"),
        ({"async_training": "false"}, "async_training: expected true or false, got 'false'"),
        ({"gconfig.max_new_tokens": "64"}, "gconfig.max_new_tokens: expected an integer, got '64'"),
        ({"gconfig.max_tokens": None}, "gconfig.max_tokens: expected an integer, got None"),
        ({"eval_gconfig.top_k": "x"}, "eval_gconfig.top_k: expected an integer, got 'x'"),
        ({"actor.discount": "1.0"}, "actor.discount: expected a number, got '1.0'"),
        ({"actor.scheduling_strategy": {"target": [1]}}, "actor.scheduling_strategy.target: expected a name"),
        ({"saver": 3}, r"saver: 3 is no section \(it has keys of its own\)"),
    ],
)
def test_what_is_refused(variant, changes, message):
    with pytest.raises(UserError, match=message):
        variant(**changes)


@pytest.mark.parametrize("key", sorted(key for key, first in REPEATED.items() if first in SAME and SAME[first][1] is not OURS))
def test_what_is_said_once_more_is_compared_with_the_default_of_a_key_that_is_silent(variant, key):
    first = REPEATED[key]
    name, default = SAME[first]
    silent = {other: None for other, of in REPEATED.items() if of == first} | {first: OUT, "gconfig.max_tokens": 32768}
    config = variant(**silent | {key: default})
    assert value_at(config, name) == default
    with pytest.raises(UserError, match=rf"{key}: {default + 1} is not {first} \({default}\), and it must be"):
        variant(**silent | {key: default + 1})


def test_a_reference_model_needs_an_actor_to_be_compared_with(variant):
    with pytest.raises(UserError, match=r"ref.path: 'one' is not actor.path \(None\)"):
        variant(**{"actor.path": OUT, "tokenizer_path": None, "sglang": None, "vllm": None, "ref.path": "one"})


def test_not_yaml(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("actor: [")
    with pytest.raises(UserError, match="not YAML"):
        config_io.load(str(path))
    for text, message in (
        ("seed: 1\nseed: 2\n", "not YAML: the key seed stands twice .*line 2"),
        ("a: &a [*a]\n", "an anchor .* a part of"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            config_io.load(str(path))
    path.write_text(YAML.read_text() + "base: &base {seed: 3}\n<<: *base\n")  # a merged key gives way to the file's own
    with pytest.raises(UserError, match="base"):
        config_io.load(str(path))
    with pytest.raises(UserError, match="No such file"):
        config_io.load(str(tmp_path / "b.yaml"))


def test_the_table_names_keys_that_exist():
    assert {name for name, _ in SAME.values()} <= set(config_io.leaves())
    assert not set(READ) & set(SAME)


def test_workdir_is_what_the_file_names(monkeypatch):
    monkeypatch.setenv("AREAL_TEST_ROOT", "/data")
    assert areal.workdir(str(YAML)) == Path("/data/experiments/gsm8k-grpo/first")


def test_a_learner_alone_is_parsed_or_refused_by_the_dim_that_it_lacks(variant):
    pools = parse(variant(allocation_mode="d8p1t1").allocation_mode, find_plugin)
    assert (str(pools.learner), pools.sampler) == ("fsdp:d8", None)
    with pytest.raises(UserError, match=r"^allocation_mode: fsdp has no pipeline parallelism \(p\)"):
        parse(variant(allocation_mode="megatron:d4p2t1").allocation_mode, find_plugin)


def test_the_actor_of_a_supervised_config_may_be_called_model():
    config = config_io.load(str(SFT))
    config_checks.check(config)
    assert (config.allocation_mode, config.actor.loss, config.train_dataset.type) == ("fsdp:d2p1t1", "sft", "gsm8k")
    assert (config.actor.path, config.actor.dtype, config.actor.optimizer.lr) == ("Qwen/Qwen3-1.7B", "float32", 2e-3)


def test_training_by_a_learner_alone_names_what_it_lacks(tmp_path):
    done = run(tmp_path, config=SFT)
    assert done.returncode == 1
    assert (
        "error: allocation_mode: fsdp:d2 only learns; training needs both, as in SAMPLER:d1+fsdp:d2 (with actor.loss=sft too"
        in (done.stderr)
    )


def run(root, *overrides, config=YAML):
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", *overrides]
    environment = os.environ | {"AREAL_TEST_ROOT": str(root)}
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, timeout=240)


@pytest.mark.slow
def test_a_whole_run_in_the_directory_that_the_file_names(tmp_path):
    model = make_model(tmp_path / "model")
    for split in ("train", "test"):
        records = [{"question": f"{i} + 1?", "answer": f"Add one.\n#### {i + 1}"} for i in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ours = {
        "allocation_mode": "jax:d1",
        "actor.path": model,
        "train_dataset.path": tmp_path,
        "valid_dataset.path": tmp_path,
        "actor.dtype": "float32",
        "jax.slots": 4,
    }
    done = run(tmp_path, *(f"--config.{key}={value}" for key, value in ours.items()))
    assert done.returncode == 0, done.stderr
    workdir = tmp_path / "experiments" / "gsm8k-grpo" / "first"
    steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]  # 0: evaluation before the first
    assert steps[1]["ppo_actor/update/importance_weight/avg"] == 1
    assert "eval-rollout/reward/avg" in steps[-1]
    assert "warning: " in done.stderr and "of no use here" in done.stderr


def test_a_name_on_a_hub_is_told(tmp_path):
    done = run(tmp_path, "--config.allocation_mode=jax:d1")
    assert (done.returncode, done.stderr.count("error: ")) == (1, 1)
    assert "actor.path" in done.stderr and "nothing is fetched from a hub" in done.stderr
