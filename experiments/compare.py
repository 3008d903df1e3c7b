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

import sys
from pathlib import Path

from absl import flags

from rljax.experiments import main

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
    from rljax.experiments.comparison import subjects
    from rljax.experiments.comparison.case import make_case
    from rljax.experiments.comparison.report import write_json
    from rljax.hf.model_directory import prepare_model_directory
    from rljax.hf.spec import read_config

    engines = subjects.check(ENGINES.value)
    config = main.config_from_flags()
    config_checks.check_values(config)
    if JSON.value:
        main.check_writable(Path(JSON.value))
    config = config_io.resolve(config)
    with main.scratch_directory() as scratch:
        model_dir = prepare_model_directory(config.actor, scratch / "init", seed=config.seed)
        other_dir = Path(OTHER.value) if OTHER.value else model_dir
        read_config(other_dir)  # refuses what is no model, before the first engine works for minutes
        case = make_case(config, model_dir, prompts=PROMPTS.value, tokens=TOKENS.value, dtype=DTYPE.value)
        pairs = subjects.compare(case, engines, other_dir, with_layers=LAYERS.value)
    for pair in pairs:
        print("\n".join(pair.lines()))
    if JSON.value:
        write_json(Path(JSON.value), main.without_scratch(str(model_dir), scratch), pairs)
    if not all(pair.agrees for pair in pairs):
        sys.exit(INCONSISTENT)


if __name__ == "__main__":
    main.run_main(compare)
