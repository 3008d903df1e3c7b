"""Evaluates a policy on validation sets: pass@k, majority vote, rewards, with confidence intervals.

    python -m experiments.evaluate --workdir=runs/a                 # newest checkpoint, own config
    python -m experiments.evaluate --workdir=runs/a --step=best --split=private_test
    python -m experiments.evaluate --config=configs/quickstart.py --model=models/X --out=results
    python -m experiments.evaluate --workdir=runs/a --config.rollout.addr=127.0.0.1:30000
    python -m experiments.evaluate --compare A.json B.json          # two results, prompt by prompt

It is the workflow of the run on valid_dataset and the sets of valid_datasets, sampled as evaluator
says; --config.KEY=VALUE changes a key, as --config.evaluator.n_samples=8. --step is newest, best, a
number of finished steps, N-failed, or export. Results and the record of every use of a split are in
WORKDIR/evaluations, or --out (docs/evaluation.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.allocation import Allocation
    from rljax.config.schema import Config
    from rljax.data.held_out import HeldOut
    from rljax.experiments.evaluated_policy import Found
    from rljax.hf.tokenizer import Tokenizer
    from rljax.rollout.evaluation import Episodes, Evaluation

main.define_config_flags(what="Directory of the run whose checkpoint is evaluated.")
STEP = flags.DEFINE_string("step", "newest", "Checkpoint of --workdir: newest, best, finished steps, N-failed, or export.")
MODEL = flags.DEFINE_string("model", None, "A Hugging Face model directory to evaluate; with a server, its tokenizer.")
SPLIT = flags.DEFINE_string("split", None, "Split of all sets, as smoke, dev, public_test, private_test; unset: the config's.")
SETS = flags.DEFINE_list("sets", [], "Names of the sets, valid_dataset or those of valid_datasets; unset: all.")
OUT = flags.DEFINE_string("out", None, "Folder of the results; unset: WORKDIR/evaluations.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")
COMPARE = flags.DEFINE_bool("compare", False, "Compare two results, given as arguments.")
DESPITE = flags.DEFINE_list("despite", [], "With --compare: settings of the protocols that may differ, as template.")


def evaluate() -> None:
    arguments = main.arguments_from_flags()
    if COMPARE.value:
        return _compare(arguments)
    if arguments:
        raise main.unexpected(arguments[0])
    # --------------------------------------------------------------------------------------------------------------------
    # Config, and the sampler's half of the allocation
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import engine
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io

    workdir = Path(main.FLAGS.workdir) if main.FLAGS.workdir else None
    config = config_io.resolve(_config(workdir))
    config_checks.check_values(config)
    config_checks.check_evaluation(config)
    _check_sets(config)
    pools = dataclasses.replace(engine.allocate(config), learner=None)
    if pools.sampler is None:
        raise UserError(f"allocation_mode: {config.allocation_mode} cannot sample (as jax:d1, or rollout.addr of a server)")
    if workdir is None and OUT.value is None:
        raise UserError("--out: missing (a folder for the results; or --workdir, the directory of a run)")
    out = Path(OUT.value) if OUT.value else (workdir or Path()) / "evaluations"
    engine.check(config, pools)
    if OUT.value:
        _make_folder(out)
    engine.prepare(pools)

    # --------------------------------------------------------------------------------------------------------------------
    # Policy, sets, episodes
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.experiments import evaluated_policy

    with main.scratch_directory() as scratch:
        found = evaluated_policy.find(config, workdir=workdir, step=STEP.value, model=MODEL.value, scratch=scratch)
        _evaluate(config, pools, found, out)


def _config(workdir: Path | None) -> Config:
    """Returns the config of --config, else of the run in --workdir, with the changes of the flags."""
    from rljax.config import io as config_io
    from rljax.diagnosis.run_files import config_of

    if main.FLAGS.config is None and workdir is None:
        raise UserError("--workdir: missing (the directory of a run; or --config, a config with an evaluation set)")
    if main.FLAGS.config is not None or workdir is None:
        config = main.config_from_flags()
    else:
        config = config_io.changed(config_of(workdir), main.overrides_from_flags())
    if SPLIT.value is None:
        return config
    overrides = [(f"valid_datasets.{name}.split", SPLIT.value) for name in config.valid_datasets]
    return config_io.changed(config, [("valid_dataset.split", SPLIT.value), *overrides])


def _evaluate(config: Config, pools: Allocation, found: Found, out: Path) -> None:
    """Evaluates on each set in turn, and prints the results."""
    from rljax.data.held_out import open_held_out
    from rljax.evaluation import uses
    from rljax.evaluation.text import text
    from rljax.hf import agreement
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.workflows import tools_of
    from rljax.workflows.scored import result_of

    tokenizer = load_tokenizer(found.model_dir, config.rollout)
    agreement.check(found.model_dir, tokenizer)
    sets = [
        each
        for each in open_held_out(config, tokenizer, tools_of(config.rollout))
        if not SETS.value or each.title in SETS.value
    ]
    before = uses.read(out)
    several = asyncio.run(_episodes(config, pools, found, sets, tokenizer))
    trees = []
    for episodes in several:
        episodes.warn()
        if not episodes.trajectories:
            raise UserError("no episode has a reward, so there is nothing to estimate (see rollout.workflow and reward.name)")
        result = result_of(episodes, config, found.policy, tokenizer)
        policy = found.policy.digest or found.policy.path
        use = uses.use_of("evaluate", result.name, result.protocol, step=found.policy.step, policy=policy)
        uses.record(out, [use])
        history = uses.history([*before, use], use.split, use.data)
        path = result.save(out)
        _write_samples(path.with_suffix(".samples.jsonl"), episodes, tokenizer)
        trees.append(result.json() | {"uses": history.json(), "file": str(path)})
        if not JSON.value:
            print(text(result, history, path), end="\n\n", flush=True)
    if JSON.value:
        print(json.dumps({"results": trees}, allow_nan=False))


def _check_sets(config: Config) -> None:
    """Checks the names of --sets. Raises UserError."""
    there = ["valid_dataset", *config.valid_datasets]
    for name in SETS.value:
        if name not in there:
            raise UserError(f"--sets: no such set: {name} (there: {', '.join(there)})")


def _make_folder(out: Path) -> None:
    """Makes the folder of the results, before minutes of work. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be made: {error.strerror or error}") from None


async def _episodes(
    config: Config, pools: Allocation, found: Found, sets: Sequence[HeldOut], tokenizer: Tokenizer
) -> list[Episodes]:
    """Runs the episodes of all sets, one set after the other."""
    from rljax import engine
    from rljax.rewards import RewardPool
    from rljax.rewards.check import Records
    from rljax.rollout import evaluation
    from rljax.sanity.trial import checked
    from rljax.workflows import check_prompts, scores_by_rewards, workflow_of
    from rljax.workflows.evaluations import evaluations_of

    assert pools.sampler is not None
    async with RewardPool(config.reward) as rewards, contextlib.AsyncExitStack() as trials:
        workflow = workflow_of(config, tokenizer, rewards)
        for held_out in sets:
            check_prompts(workflow, held_out.prompts, held_out.where)
            if scores_by_rewards(workflow):
                trial = checked(rewards, config.reward.name, Records.of_set(held_out), tokenizer)
                await trials.enter_async_context(trial)
        sampler = engine.make_lone_sampler(config, pools.sampler, found.model_dir)
        try:
            done = []
            for each in evaluations_of(config, sets, workflow, tokenizer):
                done.append(await evaluation.run(sampler, each, config, _progress(each)))
            return done
        finally:
            await sampler.close()


def _progress(evaluation: Evaluation) -> Callable[[str], None]:
    """Returns a function that counts finished episodes on a terminal."""
    total, done = len(evaluation.prompts) * evaluation.n_samples, itertools.count(1)
    shown = sys.stderr.isatty()

    def beat(_: str) -> None:
        number = next(done)
        if shown:
            print(f"\r{number}/{total} episodes", end="\n" if number == total else "", file=sys.stderr, flush=True)

    return beat


def _write_samples(path: Path, episodes: Episodes, tokenizer: Tokenizer) -> None:
    """Writes each episode's text, reward and components as a line of JSON."""
    from rljax.rollout.producer import parts_of
    from rljax.rollout.result import Failure
    from rljax.sinks.run_directory import describe, dump

    try:
        with path.open("w") as file:
            for prompt, row in zip(episodes.evaluation.prompts, episodes.results, strict=True):
                for sample, each in enumerate(row):
                    lines = [describe(part, tokenizer) for part in parts_of(each, sample)]
                    reason = each.reason if isinstance(each, Failure) else "rejected"
                    for line in lines or [{"failed": reason}]:
                        file.write(dump({"uid": prompt.uid, "sample": sample} | line) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _compare(arguments: Sequence[str]) -> None:
    from rljax.evaluation import comparison, results

    if len(arguments) != 2:
        raise UserError(f"--compare: takes two results, A.json and B.json, not {len(arguments)}")
    first, second = (results.load(Path(argument)) for argument in arguments)
    compared = comparison.compare(first, second, despite=DESPITE.value)
    print(json.dumps(compared.json(), allow_nan=False) if JSON.value else compared)


if __name__ == "__main__":
    main.run_main(evaluate, takes_arguments=True)
