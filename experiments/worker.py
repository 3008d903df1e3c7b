"""A rollout worker: builds its parts from a run's config, for `experiments.rollout --attach`.

The worker's protocol is in rljax/workers/client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljax import json_fields
from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.engine import Generator, Sampler
    from rljax.workers.client import WorkerParts

TOKEN_VARIABLE = "RLJAX_TOKEN"
TOLD = json_fields.fields({"address": json_fields.TEXT, "token": json_fields.TEXT})  # of workers.json
LOST = os.EX_TEMPFAIL  # exit status of a run's own worker that lost the run; 1 would be bad input, which ends the run
OWN_SAMPLER = ("allocation_mode", "rollout.addr")  # keys that name the sampler of this worker


def attach(address: str, *, room: int | None, patience: float, name: str, parent: int | None) -> None:
    """Works until the run ends.

    A worker that the run started exits with LOST where the connection is lost, and the run starts
    another.

    Raises UserError.
    """
    from rljax.process.parent import die_with
    from rljax.workers.client import TrainerGone, work

    if parent is not None:
        die_with(parent)
        patience = 0.0  # the run restarts its own workers
    own = any(key in OWN_SAMPLER for key, _ in main.overrides_from_flags())
    try:
        asyncio.run(work(lambda: _find_trainer(address), _parts, own_sampler=own, name=name, capacity=room, patience=patience))
    except TrainerGone as error:
        if parent is None:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(LOST)


def _find_trainer(address: str) -> tuple[str, str]:
    """Returns HOST:PORT and token of the trainer. Raises NoTrainer, UserError."""
    from rljax.workers.client import NoTrainer

    if ":" in address:
        if not (token := os.environ.get(TOKEN_VARIABLE, "")):
            raise UserError(
                f"--attach: the run's token is needed (set {TOKEN_VARIABLE}; the run has it in WORKDIR/workers.json)"
            )
        return address, token
    address_file = Path(address) / "workers.json"
    try:
        told = json.loads(address_file.read_text())
        json_fields.demand(told, TOLD, str(address_file))
        return told["address"], told["token"]
    except PermissionError:
        raise UserError(
            f"--attach: {address_file} is another user's (give HOST:PORT, and the token in {TOKEN_VARIABLE})"
        ) from None
    except (OSError, ValueError):  # not there, or just being written
        raise NoTrainer(f"no run listens in {address} (one with rollout.listen or rollout.workers does)") from None


@contextlib.asynccontextmanager
async def _parts(config: Config, tokenizer_dir: Path, model_dir: Path | None, remote: Generator) -> AsyncIterator[WorkerParts]:
    from rljax import engine
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.hf.spec import read_vocab_size
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.process import interpreter
    from rljax.rewards import RewardPool
    from rljax.rollout.producer import GroupRunner, RetryingGenerator
    from rljax.workers.client import WorkerParts
    from rljax.workflows import find_filter, sampling_params, workflow_of

    overrides = main.overrides_from_flags()
    if model_dir is not None:  # this worker does not sample from the servers of the run
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, addr=""))
    config = config_io.changed(config, overrides)
    config_checks.check_values(config)
    tokenizer = load_tokenizer(tokenizer_dir, config.rollout)
    params = sampling_params(config.gconfig, tokenizer)
    async with RewardPool(config.reward) as rewards:
        workflow = workflow_of(config, tokenizer, rewards)
        sampler: Sampler | None = None
        if model_dir is not None:
            pools = engine.allocate(config)
            pool = engine.require_sampler(pools)
            sampler = await asyncio.to_thread(engine.find_plugin(pool.engine).make_sampler, config, pool, model_dir)
        patient = RetryingGenerator(
            sampler or remote,
            timeout=config.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: parts.lost.update([f"rollout/lost/{error.kind}"]),
        )
        runner = GroupRunner(
            workflow,
            patient,
            params,
            config.gconfig.n_samples,
            config.seed,
            find_filter(config.rollout.should_accept_fn, mask_no_eos=config.actor.mask_no_eos),
            config.episode_timeout,
            read_vocab_size(tokenizer_dir),
        )
        parts = WorkerParts(runner, sampler, rewards.take_metrics)
        interpreter.settle()
        try:
            yield parts
        finally:
            if sampler is not None:
                await sampler.close()
