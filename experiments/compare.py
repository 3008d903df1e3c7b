"""Rollout consistency: the same prompts through transformers, SGLang and JAX, and a verdict.

    python -m experiments.compare --config=configs/smollm2_gsm8k.py --layers
    python -m experiments.compare --config=configs/smollm2_gsm8k.py --engines=transformers,sglang \
        --config.sglang.python=/opt/sglang/bin/python

Each engine completes the prompts with its likeliest tokens, as it does in a run, and scores the
prompts and the completions of the first engine. Compared with the first engine are: the first token
at which a completion differs, and whether the two were nearly tied there; the log-prob of each
token (mean, p99, max); with --layers, hidden states layer by layer. Each has a bound, by dtype.
Prompts are the first of the validation set (of the training set, if there is none). --json=FILE
writes all of it. Exit status 0 if all are consistent, 2 if not, 1 for bad input. transformers needs
the extra [torch]; docs/compare.md has examples.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from absl import flags

from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.compare_case import Case, Greedy, Results, Subject
from rljax.experiments.compare_report import Pair, layers_apart, write_json

if TYPE_CHECKING:
    from rljax.config.schema import Config, DatasetConfig

SUBJECTS = {
    "transformers": "rljax.experiments.compare_transformers:TransformersSubject",
    "jax": "rljax.experiments.compare_jax:JaxSubject",
    "sglang": "rljax.experiments.compare_sglang:SglangSubject",
}
INCONSISTENT = 2  # exit status

main.define_config_flags(workdir=False)
ENGINES = flags.DEFINE_list("engines", ["transformers", "jax"], "Engines to compare with the first of them.")
PROMPTS = flags.DEFINE_integer("prompts", 16, "Prompts, from the first of the data.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 32, "Longest completion, tokens.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of weights and arithmetic, in all engines.")
LAYERS = flags.DEFINE_bool("layers", False, "Compare the hidden states of the first prompt, layer by layer (not of SGLang).")
OTHER = flags.DEFINE_string("other", None, "Model directory of all engines but the first; unset: the same.")
JSON = flags.DEFINE_string("json", None, "File for the whole report.")


def compare() -> None:
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.hf.model_directory import prepare_model_directory

    engines = _engines(ENGINES.value)
    config = main.config_from_flags()
    config_checks.check_values(config)
    if JSON.value:
        main.check_writable(Path(JSON.value))
    config = config_io.resolve(config)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = prepare_model_directory(config.actor, Path(scratch) / "init", seed=config.seed)
        case = make_case(config, model_dir)
        pairs = compared(case, engines, Path(OTHER.value) if OTHER.value else model_dir, with_layers=LAYERS.value)
    for pair in pairs:
        print("\n".join(pair.lines()))
    if JSON.value:
        write_json(Path(JSON.value), str(model_dir), pairs)
    if not all(pair.agrees for pair in pairs):
        sys.exit(INCONSISTENT)


def _engines(names: list[str]) -> list[str]:
    from rljax.config.registry import nearest

    for name in names:
        if name not in SUBJECTS:
            raise UserError(f"--engines: no such engine: {name} ({nearest(name, SUBJECTS)})")
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UserError(f"--engines: {','.join(names)} (at least two of {', '.join(SUBJECTS)}, each once)")
    return names


def make_case(config: Config, model_dir: Path) -> Case:
    """Reads the prompts, and gives all engines one dtype and room for the longest."""
    from rljax.config import io as config_io
    from rljax.data import open_prompts
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.workflows import sampling_params

    config = config_io.changed(
        config,
        [
            ("gconfig.greedy", "true"),
            ("gconfig.temperature", "1.0"),
            ("gconfig.min_new_tokens", "0"),
            ("gconfig.max_new_tokens", str(TOKENS.value)),
            ("actor.dtype", DTYPE.value),
        ],
    )
    tokenizer = load_tokenizer(model_dir)
    source = open_prompts(_data(config), key="valid_dataset", seed=config.seed, tokenizer=tokenizer)
    chosen = list(itertools.islice(source.epoch(0), PROMPTS.value))
    prompts = tuple(np.asarray(tokenizer.apply_chat_template(p.messages), np.int32) for p in chosen)
    stops = sampling_params(config.gconfig, tokenizer).stop_token_ids
    return Case(config, model_dir, DTYPE.value, tuple(p.uid for p in chosen), prompts, stops)


def _data(config: Config) -> DatasetConfig:
    return config.valid_dataset if config.valid_dataset.path else config.train_dataset


def compared(case: Case, engines: list[str], other_dir: Path, *, with_layers: bool) -> list[Pair]:
    """Compares each engine with the first one; two models are in memory at a time."""
    first = _made(engines[0], case)
    try:
        completions = first.generate(case.prompts)
        sequences = [_joined(prompt, done) for prompt, done in zip(case.prompts, completions, strict=True)]
        scores = first.score(sequences)
        states = first.hidden_states(case.prompts[0]) if with_layers else None
        pairs = []
        for name in engines[1:]:
            other = _made(name, dataclasses.replace(case, model_dir=other_dir))
            try:
                theirs = other.generate(case.prompts)
                their_scores = other.score(sequences)
                their_states = None if states is None else other.hidden_states(case.prompts[0])
            finally:
                other.close()
            checks = first.score([_joined(prompt, done) for prompt, done in zip(case.prompts, theirs, strict=True)])
            results = Results(completions, scores, theirs, their_scores, checks)
            layers = None if states is None or their_states is None else layers_apart(states, their_states)
            pairs.append(results.pair(engines[0], name, case, layers))
    finally:
        first.close()
    return pairs


def _made(name: str, case: Case) -> Subject:
    module, _, cls = SUBJECTS[name].partition(":")
    try:
        return cast("Subject", getattr(importlib.import_module(module), cls)(case))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise UserError(f"--engines: {name}: {error.name} is not installed (pip install 'rljax[torch]>=0.1')") from None


def _joined(prompt: np.ndarray, completion: Greedy) -> np.ndarray:
    return np.concatenate([prompt, completion.token_ids])


if __name__ == "__main__":
    main.run_main(compare)
