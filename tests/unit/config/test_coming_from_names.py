"""Keys of TRL, verl and AReaL that docs/coming-from.md and the reader of AReaL's files name: they
are in the packages themselves, with the defaults that the page sets.

Nothing of a package is imported: its sources are read, so that its wheel on PYTHONPATH is enough
(`pip download --no-deps trl verl areal`). A package that is not there is left out.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from rljax.config.foreign import areal_keys
from tests.unit.config.test_coming_from import OLDER_OF_TRL

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming-from.md"
# Set by `+key` on verl's command line, so that no default stands in its file
ADDED = "reward.reward_kwargs.overlong_buffer_cfg."
# Spellings of AReaL before v1, which its files of that time have
OLDER = {
    *(
        "behav_imp_weight_cap",
        "behave_imp_weight_cap",
        "behave_imp_weight_mode",
        "recompute_logprobs",
        "group_reward_norm",
        "group_adv_norm",
        "dynamic_sampling",
    ),
    *("max_concurrent_rollouts", "allocation_mode", "async_training", "disable_overlap_schedule"),
}


def source(package: str, *parts: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.loader is None or not spec.submodule_search_locations:
        pytest.skip(f"left out: {package} is not installed")
    path = "/".join([*map(str, spec.submodule_search_locations), *parts])
    return spec.loader.get_data(path).decode()  # type: ignore[attr-defined]


def rows(system: str) -> list[tuple[list[str], list[str]]]:
    """Names in the first and second column of each row of a table."""
    section = PAGE.read_text().split(f"## {system}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    return [(expanded(first), expanded(second)) for first, second, *_ in cells]


def expanded(cell: str) -> list[str]:
    """Names in a cell; `a.{b,c}` are two, and a name without a section has that of the one before it."""
    names, before = [], ""
    for token in re.findall(r"`([^`]+)`", cell):
        several = re.fullmatch(r"([\w.]*)\{(.*)\}", token)
        found = [several[1] + each for each in several[2].split(",")] if several else [token]
        names += [name if "." in name else before + name for name in found]
        before = found[0].rpartition(".")[0] + "." if "." in found[0] else before
    return names


def named(system: str) -> list[str]:
    """Names in the first column of a table."""
    return [name for theirs, _ in rows(system) for name in theirs]


def fields(*texts: str) -> dict[str, object]:
    """Fields of dataclasses with their defaults, as far as these are literals."""
    found: dict[str, object] = {}
    for node in (node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign)):
        value = node.value
        if isinstance(value, ast.Call):
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        assert isinstance(node.target, ast.Name | ast.Attribute)
        name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
        try:
            found.setdefault(name, None if value is None else ast.literal_eval(value))
        except ValueError:
            found.setdefault(name, ...)
    return found


def setting(name: str) -> object:
    """A config of ours to which a function of the page was applied."""
    from tests.unit.config.test_coming_from import config_of

    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    functions: dict[str, object] = {}
    exec(compile(block, str(PAGE), "exec"), functions)
    return config_of(functions[name])


def test_trl_has_the_keys_and_the_defaults_of_the_page():
    theirs = [source("trl", "trainer", name) for name in ("grpo_config.py", "base_config.py")]
    theirs += [source("trl", "trainer", "model_config.py"), source("trl", "scripts", "utils.py")]
    found = fields(*theirs, source("transformers", "training_args.py"))
    assert [name for name in named("TRL") if name not in found.keys() | OLDER_OF_TRL] == []
    config = setting("as_trl")
    actor, optimizer, sampling = config.actor, config.actor.optimizer, config.gconfig
    assert (sampling.n_samples, sampling.max_new_tokens) == (
        found["num_generations"],
        found["max_completion_length"],
    )
    assert (optimizer.weight_decay, optimizer.lr_scheduler_type) == (found["weight_decay"], found["lr_scheduler_type"])
    assert optimizer.beta2 == found["adam_beta2"]
    assert (actor.kl_ctl, actor.eps_clip, actor.reward_norm.std_level) == (
        found["beta"],
        found["epsilon"],
        found["scale_rewards"],
    )
    assert (found["loss_type"], actor.loss_aggregation) == ("dapo", "token-mean")
    assert actor.behav_imp_weight_cap == found["vllm_importance_sampling_clip_max"]


def test_verl_has_the_keys_and_the_defaults_of_the_page():
    tree = yaml.safe_load(source("verl", "trainer", "config", "_generated_ppo_trainer.yaml"))

    def value(path, tree=tree):
        for name in path.split("."):
            tree = tree[name]
        return tree

    def has(path):
        try:
            value(path)
        except (KeyError, TypeError):
            return path.startswith((ADDED, "reward_model.overlong_buffer."))  # the latter before 0.7
        return True

    assert [name for name in named("verl") if not (has(name) or has(f"actor_rollout_ref.{name}"))] == []
    actor, theirs = setting("as_verl").actor, "actor_rollout_ref.actor"
    assert (actor.c_clip, actor.loss_aggregation) == (value(f"{theirs}.clip_ratio_c"), value(f"{theirs}.loss_agg_mode"))
    assert actor.eps_clip == value(f"{theirs}.clip_ratio_low") == value(f"{theirs}.clip_ratio_high")
    assert actor.optimizer.beta2 == value(f"{theirs}.optim.betas")[1]
    assert value("algorithm.norm_adv_by_std_in_grpo") and actor.reward_norm.std_level == "group"
    assert (value("algorithm.rollout_correction.rollout_is"), value(f"{theirs}.use_kl_loss")) == (None, False)


def test_areal_has_the_keys_that_are_read():
    found = fields(source("areal", "api", "cli_args.py"))
    keys = (*areal_keys.SAME, *areal_keys.READ)
    assert {key for key in keys if key.rpartition(".")[2] not in found} - {
        k for k in keys if k.rpartition(".")[2] in OLDER
    } == set()
    for key in (
        "eps_clip",
        "reward_scaling",
        "reward_bias",
        "kl_ctl",
        "kl_estimator",
        "ppo_n_minibatches",
        "reward_clip",
        "c_clip",
    ):
        assert areal_keys.SAME[f"actor.{key}"][1] == found[key], key
