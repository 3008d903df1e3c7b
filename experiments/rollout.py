"""Runs the workflow with no learner: once, to write the trajectories, or as a worker of a run.

    python -m experiments.rollout --config=configs/quickstart.py --out=runs/batch
    python -m experiments.rollout --attach=runs/quickstart

OUT/batch.safetensors has token ids, masks, log-probs and versions, OUT/batch.json text, rewards and
components, to read or for experiments.replay, which trains on them. The prompts are the first
rollout.consumer_batch_size that training would take, and the completions those that it would sample
with the same seed and weights. Several processes, also on several hosts, share these prompts by
--shard=0/4, --shard=1/4, ..., each with an OUT of its own; replay takes their dumps as one batch.

With --attach it is a worker of a run that has rollout.workers or rollout.listen (docs/runtime.md):
--attach=HOST:PORT with the run's token in RLJAX_TOKEN, or --attach=WORKDIR if that can be read. It
uses the run's config, with the changes of --config.KEY=VALUE, and the run's sampler, unless
allocation_mode or rollout.addr is set: these then name the sampler of this worker.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from rljax.config.schema import Config
from rljax.errors import EpisodeError, UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.data import PromptSource
    from rljax.engine import Sampler
    from rljax.hf.tokenizer import Tokenizer
    from rljax.types import Group, Prompt

main.define_config_flags(workdir=False)
OUT = flags.DEFINE_string("out", None, "Directory to write; made where it is missing.")
ATTACH = flags.DEFINE_string("attach", None, "Run to attach to as a worker: its HOST:PORT, or its workdir.")
SHARD = flags.DEFINE_string(
    "shard", "0/1", "INDEX/COUNT: this process's share of the prompts, where COUNT processes share them."
)
ROOM = flags.DEFINE_integer("room", None, "With --attach: prompts at once; unset: as many as the run gives.", lower_bound=1)
PATIENCE = flags.DEFINE_float("patience", 600.0, "With --attach: seconds to wait for a run that does not answer.")
flags.register_validator("patience", lambda seconds: seconds >= 0, message="not a number of seconds (0 or more)")  # nor NaN
NAME = flags.DEFINE_string("name", "", "With --attach: name of this worker in the run's log.")
PARENT = flags.DEFINE_integer("parent", None, "Process id of the run that started this worker, which ends with it.")


def rollout() -> None:
    if ATTACH.value is not None:
        from rljax.experiments import worker

        worker.attach(ATTACH.value, room=ROOM.value, patience=PATIENCE.value, name=NAME.value, parent=PARENT.value)
        return
    # --------------------------------------------------------------------------------------------------------------------
    # Config and allocation
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import engine
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io

    config = config_io.resolve(main.config_from_flags())
    config_checks.check_values(config)
    if OUT.value is None:
        raise UserError("--out: missing (a directory for the batch)")
    pools = engine.allocate(config)
    engine.check(config, pools)
    engine.prepare(pools)
    pool = engine.require_sampler(pools)

    # --------------------------------------------------------------------------------------------------------------------
    # Model directory, tokenizer, data
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.data import open_prompts
    from rljax.hf import agreement
    from rljax.hf.model_directory import prepare_model_directory
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.rollout import dump
    from rljax.workflows import tools_of

    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    model_dir = prepare_model_directory(config.actor, out / "init", seed=config.seed)
    tokenizer = load_tokenizer(model_dir, config.rollout)
    agreement.check(model_dir, tokenizer)
    shard = _shard(SHARD.value)
    source = open_prompts(
        config.train_dataset,
        key="train_dataset",
        seed=config.seed,
        tokenizer=tokenizer,
        shard=shard,
        added_tools=tools_of(config.rollout),
    )
    size = config.batch_size
    prompts = [next(source) for _ in range(source.share(size))]
    if not prompts:
        raise UserError(f"--shard: {SHARD.value} of {size} prompts is none (rollout.consumer_batch_size has more)")

    # --------------------------------------------------------------------------------------------------------------------
    # Sampler and workflow
    # --------------------------------------------------------------------------------------------------------------------
    sampler = engine.make_lone_sampler(config, pool, model_dir)
    groups, failures = asyncio.run(_groups(config, sampler, source, prompts, tokenizer))
    dump.save(out, groups, tokenizer)
    _report(groups, failures, out)


def _shard(text: str) -> tuple[int, int]:
    """Parses INDEX/COUNT. Raises UserError unless 0 <= INDEX < COUNT."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shard: {text!r} is not INDEX/COUNT, counted from 0, as in 0/4")
    return int(index), int(count)


async def _groups(
    config: Config, sampler: Sampler, source: PromptSource, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> tuple[list[Group], collections.Counter[str]]:
    """Generates a group per prompt, of the episodes that worked; counts failures by kind."""
    from rljax.rewards import RewardPool
    from rljax.rewards.check import Records
    from rljax.rollout.buffer import Ticket
    from rljax.rollout.producer import GroupRunner
    from rljax.sanity.trial import checked
    from rljax.types import Group
    from rljax.workflows import check_prompts, find_filter, sampling_params, scores_by_rewards, workflow_of

    failures: collections.Counter[str] = collections.Counter()
    params = sampling_params(config.gconfig, tokenizer)
    n_samples = config.gconfig.n_samples

    async with RewardPool(config.reward) as rewards, contextlib.AsyncExitStack() as trials:
        workflow = workflow_of(config, tokenizer, rewards)
        check_prompts(workflow, prompts, source.where)
        if scores_by_rewards(workflow):
            trial = checked(rewards, config.reward.name, Records.of_stream(source), tokenizer)
            await trials.enter_async_context(trial)
        runner = GroupRunner(workflow, sampler, params, n_samples, config.seed, find_filter(None), config.episode_timeout)
        try:
            results = await asyncio.gather(*(runner.run(Ticket(i, prompt)) for i, prompt in enumerate(prompts)))
        finally:
            await sampler.close()
    groups = [Group(prompt.uid, result.trajectories) for prompt, result in zip(prompts, results, strict=True)]
    for group, result in zip(groups, results, strict=True):
        for failure in result.failures:
            if not isinstance(failure.error, EpisodeError):
                raise failure.error
            failures[failure.kind] += 1
        failures["rejected"] += n_samples - len(group.episodes()) - len(result.failures)
    return groups, failures


def _report(groups: Sequence[Group], failures: collections.Counter[str], out: Path) -> None:
    from rljax.types import episode_rewards

    rewards = [reward for group in groups for reward in episode_rewards(group.trajectories)]
    failed = "".join(f", {count} {kind}" for kind, count in failures.items() if count)
    if not rewards:
        raise UserError(f"no episode worked (0 of them{failed}): see rollout.workflow and reward.name")
    mean = sum(rewards) / len(rewards)
    print(f"{out}: {len(groups)} groups, {len(rewards)} episodes{failed}; reward {mean:.4g}")


if __name__ == "__main__":
    main.run_main(rollout)
