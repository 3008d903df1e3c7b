"""Reads a YAML file written for AReaL as a config of rljax: `--config=gsm8k_grpo.yaml`.

    tree = load("gsm8k_grpo.yaml")      # nested; one warning names the unused keys
    workdir("gsm8k_grpo.yaml")          # cluster.fileroot/experiment_name/trial_name

`areal_keys.py` has the table of keys; docs/areal.md says what each becomes. An unknown key is
refused with the nearest name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from absl import logging

from rljax.config import defaults
from rljax.config.foreign import key_names
from rljax.config.foreign.areal_keys import DECLARED, ONLY, OURS, READ, REPEATED, SAME, SGLANG_FLAGS, UNUSED
from rljax.config.foreign.areal_objective import objective
from rljax.config.keys import unwrap_optional, walk
from rljax.config.registry import nearest
from rljax.config.schema import Config
from rljax.errors import UserError

Flat = dict[str, Any]  # dotted key -> value; a list is a value, and so is a section that is null

SUFFIXES = (".yaml", ".yml")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_DIMS = re.compile(r"([A-Za-z][0-9]+)+")  # dims of a pool without an engine name
_FLAGS = tuple(f"sglang.{flag}" for flag in SGLANG_FLAGS)
_LABELS = ("experiment_name", "trial_name", "fileroot")  # keys of any section; they change no arithmetic


def is_areal(location: str) -> bool:
    return location.lower().endswith(SUFFIXES)


def load(location: str) -> dict[str, Any]:
    """Returns the file's keys as a nested config of rljax, over the defaults of configs/base.py.

    Raises:
      UserError: not YAML, a reference to nothing, a key that does not exist, or a value for
        something that rljax does not implement.
    """
    theirs = _named(_flat(_read(location)))
    unused = _checked(theirs, location)
    ours: Flat = {}
    for key, (name, default) in SAME.items():
        value = theirs.get(key, default)
        if value is not OURS and not (value is None and default is OURS):
            ours[name] = _several(value) if isinstance(default, tuple) else value
    for convert in CONVERSIONS:
        ours |= convert(theirs)
    if unused:
        logging.warning("%s: of no use here: %s (docs/areal.md)", location, ", ".join(unused))
    tree = defaults.get_config().to_dict()
    for name, value in ours.items():
        _set(tree, name, value)
    return tree


def workdir(location: str) -> Path | None:
    """Returns the run directory that the file itself names, or None."""
    theirs = _flat(_read(location))
    names = [theirs.get(key) for key in ("cluster.fileroot", "experiment_name", "trial_name")]
    return Path(*map(str, names)) if all(names) else None


# The file ----------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML loader with YAML 1.2's numbers: 1e-8 is one, while PyYAML reads it as text.

    A key that stands twice is an error, of which PyYAML takes the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _read(location: str) -> dict[str, Any]:
    """Reads the file and resolves its references."""
    try:
        tree = yaml.load(Path(location).read_text(), _Loader)
    except OSError as error:
        raise UserError(f"--config: {location}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {location}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"--config: {location}: no keys (an AReaL config, as its examples/math/gsm8k_grpo.yaml)")
    try:
        return _resolved(tree, tree, location, ())
    except RecursionError:
        raise UserError(f"--config: {location}: an anchor (&) stands for something that it is a part of") from None


def _resolved(value: Any, tree: dict[str, Any], location: str, path: tuple[str, ...]) -> Any:
    """Replaces each ${a.b} in `value` by the value of that key.

    ${oc.env:NAME,default} becomes that environment variable.
    """
    if isinstance(value, dict):
        return {str(key): _resolved(item, tree, location, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, tree, location, path) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value.strip()):
        return _referred(whole[1], tree, location, path)
    return _REFERENCE.sub(lambda found: str(_referred(found[1], tree, location, path)), value)


def _referred(name: str, tree: dict[str, Any], location: str, path: tuple[str, ...]) -> Any:
    if name in path:
        raise UserError(f"{location}: ${{{name}}} refers to itself")
    if name.startswith("oc.env:"):
        variable, comma, default = name.removeprefix("oc.env:").partition(",")
        if variable.strip() not in os.environ and not comma:
            raise UserError(f"{location}: ${{{name}}}: no such environment variable")
        return os.environ.get(variable.strip(), default.strip())
    found: Any = tree
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            raise UserError(
                f"{location}: ${{{name}}} refers to nothing (a key from the top, as ${{actor.path}}, or oc.env:NAME)"
            )
        found = found[part]
    return _resolved(found, tree, location, (*path, name))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Flat:
    flat: Flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _named(theirs: Flat) -> Flat:
    """Renames `model`, as older SFT configs call the actor, to `actor`."""
    if any(key.startswith("actor.") for key in theirs):
        return theirs
    return {re.sub(r"^model(?=\.)", "actor", key): value for key, value in theirs.items()}


def _several(value: Any) -> tuple[Any, ...]:
    """Returns a list's entries; a single value is a list of one, and null or "" is empty."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return () if value in (None, "") else (value,)


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, leaf = name.split(".")
    for section in sections:  # an engine's section may not be there yet
        tree = tree.setdefault(section, {})
    tree[leaf] = value


_COMPUTED: dict[str, tuple[type | tuple[type, ...], str]] = {  # values that are computed with before ours are checked
    "async_training": ((bool, type(None)), "true or false"),
    "actor.scheduling_strategy.target": ((str, type(None)), "a name"),
    "rollout.scheduling_strategy.target": ((str, type(None)), "a name"),
    "eval_gconfig.top_k": ((int, float, type(None)), "an integer"),
    "gconfig.top_k": ((int, float, type(None)), "an integer"),
    "gconfig.max_new_tokens": (int, "an integer"),
    "gconfig.max_tokens": (int, "an integer"),
    "train_dataset.max_length": ((int, type(None)), "an integer or null"),
}


def _checked(theirs: Flat, location: str) -> list[str]:
    """Checks every key and every value that must be a certain one; returns the keys not used here.

    A branch of UNUSED is returned as one name.
    """
    for key, (kinds, expected) in _COMPUTED.items():
        if key in theirs and not isinstance(theirs[key], kinds):
            raise UserError(f"{location}: {key}: expected {expected}, got {theirs[key]!r}")
    _check_declared(theirs, location)
    known = {*SAME, *READ, *ONLY, *REPEATED, *_FLAGS}
    unused: dict[str, None] = {}
    for key, value in theirs.items():
        if key in ONLY:
            allowed, why = ONLY[key]
            if value not in allowed:
                raise UserError(f"{location}: {key}: {value!r} is not {' or '.join(map(str, allowed))}: {why}")
        elif key in REPEATED:
            first = REPEATED[key]
            default = SAME[first][1] if first in SAME else None
            said = theirs.get(first, None if default is OURS else default)
            if value is None or value == said:
                continue
            if not key.endswith(_LABELS):
                raise UserError(f"{location}: {key}: {value!r} is not {first} ({said!r}), and it must be")
            unused[key] = None
        elif key not in known and not (value in (None, {}) and _is_section(key)):
            if _is_section(key):
                raise UserError(f"{location}: {key}: {value!r} is no section (it has keys of its own)")
            branch = next((name for name in UNUSED if key == name or key.startswith(f"{name}.")), None)
            if branch is None:
                last = key.rpartition(".")[2]
                told = key_names.hint(key, last) if key_names.knows(key, last) else _nearest(key)
                raise UserError(f"{location}: {key}: no such key of AReaL's ({told})")
            if value not in (None, False):
                of_use = any(name in known and name.startswith(f"{branch}.") for name in theirs)
                unused[f"the rest of {branch}" if of_use else branch] = None
    return list(unused)


def _check_declared(theirs: Flat, location: str) -> None:
    """Checks values by the declarations of the keys that they become here. Raises UserError."""
    leaves = {leaf.path: leaf for leaf in walk(Config())}
    for key, ours in DECLARED.items():
        if theirs.get(key) in (None, {}):  # not set, or off
            continue
        leaf, value = leaves[ours], theirs[key]
        optional, kind = unwrap_optional(leaf.type)
        if kind in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{location}: {key}: expected a number{' or null' if optional else ''}, got {value!r}")
        if kind is str and not isinstance(value, str):
            raise UserError(f"{location}: {key}: expected {' or '.join(leaf.key.choices) or 'text'}, got {value!r}")
        leaf.key.check(f"{location}: {key}", value)


def _is_section(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in (*SAME, *READ, *UNUSED))


def _nearest(key: str) -> str:
    """Suggests similar names, those of the same section first."""
    names = [*SAME, *READ, *ONLY, *REPEATED, *UNUSED, *_FLAGS]
    beside = [name for name in names if name.rpartition(".")[0] == key.rpartition(".")[0]]
    return nearest(key, beside or names)


# Conversions -----------------------------------------------------------------------------------------------------------


def _allocation(theirs: Flat) -> Flat:
    """Builds `allocation_mode` from theirs, or from the backends of rollout and actor.

    A learner without a name is FSDP's.
    """
    mode = theirs.get("allocation_mode")
    backends = [theirs.get(f"{part}.backend") for part in ("rollout", "actor")]
    if not mode:
        targets = {theirs.get(f"{part}.scheduling_strategy.target") for part in ("rollout", "actor")}
        mode = ("|" if targets & {"actor", "rollout"} else "+").join(str(backend) for backend in backends if backend)
    if not mode:
        return {}
    *sampler, learner = re.split(r"([+|])", str(mode), maxsplit=1)
    if _DIMS.fullmatch(learner):
        learner = f"fsdp:{learner}"
    learner = re.sub(r"^(megatron|archon)(?=[.:]|$)", "fsdp", learner)
    return {"allocation_mode": "".join((*sampler, learner))}


def _sampling(theirs: Flat) -> Flat:
    top_k = theirs.get("gconfig.top_k", 0)
    flags = [f"--{key.partition('.')[2].replace('_', '-')}" for key in _FLAGS]
    extra: list[str] = []
    for key, flag in zip(_FLAGS, flags, strict=True):
        value = theirs.get(key)
        if value not in (None, False, ""):
            extra += [flag] if value is True else [flag, str(value)]
    prompt, completion = theirs.get("train_dataset.max_length"), theirs.get("gconfig.max_new_tokens", 16384)
    most = theirs.get("gconfig.max_tokens", 32768)
    if most < completion + (prompt or 1):
        raise UserError(
            f"gconfig.max_tokens: {most} would cut completions that gconfig.max_new_tokens={completion} "
            f"allows behind prompts of train_dataset.max_length={prompt} (a smaller max_new_tokens)"
        )
    context = {"jax.context_length": prompt + completion} if isinstance(prompt, int) and isinstance(completion, int) else {}
    synchronous = {"rollout.max_head_offpolicyness": 0} if theirs.get("async_training") is False else {}
    return {
        "gconfig.top_k": _top_k(top_k),
        "sglang.extra_args": tuple(extra),
        **context,
        **synchronous,
    }


def _top_k(value: Any) -> Any:
    return 0 if isinstance(value, int) and value >= 10**6 else value  # theirs is 1e8 for no limit


def _evaluation(theirs: Flat) -> Flat:
    """Evaluates with the sampling parameters of training unless `eval_gconfig` changes them.

    Greedy completions are all the same: one is enough.
    """
    defaults = {"n_samples": 1, "temperature": 1.0, "greedy": False, "top_p": 1.0, "top_k": 0}
    params = {key: theirs.get(f"eval_gconfig.{key}", theirs.get(f"gconfig.{key}", value)) for key, value in defaults.items()}
    params["top_k"] = _top_k(int(params["top_k"] or 0))
    params["max_new_tokens"] = theirs.get("eval_gconfig.max_new_tokens")
    if params["greedy"]:
        params["n_samples"] = 1
    for key in ("stop", "stop_token_ids"):
        ours = _several(theirs.get(f"gconfig.{key}"))
        if f"eval_gconfig.{key}" in theirs and (others := _several(theirs[f"eval_gconfig.{key}"])) != ours:
            raise UserError(f"eval_gconfig.{key}: {others} is not gconfig.{key} {ours}: an evaluation stops as training does")
    off = {} if theirs.get("valid_dataset.path") else {"evaluator.freq_steps": None, "evaluator.freq_epochs": None}
    return {f"evaluator.{key}": value for key, value in params.items()} | off


def _optimizers(theirs: Flat) -> Flat:
    ours: Flat = {}
    for part in ("actor", "critic"):
        kind = theirs.get(f"{part}.optimizer.type", "adam")
        if kind != "adam":
            raise UserError(f"{part}.optimizer.type: {kind!r} is not implemented (adam, which is AdamW)")
        if not theirs.get(f"{part}.optimizer.gradient_clipping", 1.0):
            raise UserError(
                f"{part}.optimizer.gradient_clipping: 0 makes every gradient 0 there, and is no bound here (a bound)"
            )
        ours[f"{part}.optimizer.type"] = "adamw"
        if theirs.get(f"{part}.optimizer.lr_scheduler_type") == "linear":
            ours[f"{part}.optimizer.min_lr_ratio"] = 0.0  # theirs is for cosine alone
    return ours


def _learner(theirs: Flat) -> Flat:
    """Converts what the learner needs beside the objective: memory, adapters, determinism."""
    row = theirs.get("actor.mb_spec.max_tokens_per_mb")
    longest = (theirs.get("train_dataset.max_length") or 0) + theirs.get("gconfig.max_new_tokens", 16384)
    modules = theirs.get("actor.target_modules") or "all-linear"
    every = modules in ("all-linear", ["all-linear"])
    return {
        **({} if row else {"actor.mb_spec.max_tokens_per_row": max(longest, 4096)}),
        "actor.gradient_checkpointing": "full" if theirs.get("actor.gradient_checkpointing", False) else "none",
        "actor.lora.rank": theirs.get("actor.lora_rank", 32) if theirs.get("actor.use_lora", False) else 0,
        "actor.lora.alpha": theirs.get("actor.lora_alpha", 16),
        **({} if every else {"actor.lora.target_modules": _several(modules)}),
        "deterministic": any(
            theirs.get(f"actor.{engine}.use_deterministic_algorithms", False) for engine in ("megatron", "archon")
        ),
    }


def _data(theirs: Flat) -> Flat:
    """Chooses format and reward for GSM8K; for other data sets AReaL has them in its scripts."""
    ours: Flat = {}
    for part in ("train_dataset", "valid_dataset"):
        if "gsm8k" in Path(str(theirs.get(f"{part}.path") or "")).name.lower():
            ours[f"{part}.type"] = "gsm8k" if theirs.get(f"{part}.type") == "sft" else "areal_gsm8k"
            ours["reward.name"] = "gsm8k"
    return ours


def _recovery_and_sinks(theirs: Flat) -> Flat:
    """Converts recovery and sinks."""
    wandb = theirs.get("stats_logger.wandb.mode", "disabled") != "disabled"
    project = theirs.get("stats_logger.wandb.project")
    return {
        "recover.mode": "fresh" if theirs.get("recover.mode", "disabled") in ("disabled", "off") else "auto",
        "stats_logger.wandb": wandb,
        **({"stats_logger.wandb_project": project} if project else {}),
        "stats_logger.tensorboard": bool(theirs.get("stats_logger.tensorboard.path")),
    }


# Conversions of keys that mean something together, in order: a later one overrides an earlier one.
CONVERSIONS = (
    _allocation,
    _sampling,
    _evaluation,
    _optimizers,
    _learner,
    objective,
    _data,
    _recovery_and_sinks,
)
