"""A standalone inference server of the sampler that `allocation_mode` names.

    python -m experiments.serve --config=configs/smollm2_gsm8k.py --config.serve.port=30000

A run attaches to it with --config.rollout.addr=127.0.0.1:30000.

Prints its address once it answers, and runs until it is told to stop. It speaks SGLang's native
protocol, and OpenAI's at /v1 (docs/agents.md). It outlives the runs that attach to it: each
publishes its own weights. With
--workdir=DIR it begins with the exported model of the run there, DIR/export. Clients need its
token: that of RLJAX_TOKEN, or the user's own, which is in a file and which runs on this machine
find.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from absl import logging

from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.engine import Sampler
    from rljax.hf.tokenizer import HFTokenizer

main.define_config_flags(what="Directory of a run whose exported model is served; the place for a model made from scratch.")


def serve() -> None:
    from rljax import engine
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.config.allocation import Allocation
    from rljax.hf import agreement
    from rljax.hf.tokenizer import load_tokenizer

    config = config_io.resolve(main.config_from_flags())
    config_checks.check_values(config)
    pools = engine.allocate(config)
    pool = engine.require_sampler(pools)
    engine.check(config, Allocation(pool, None))
    engine.prepare(Allocation(pool, None))
    model_dir = _trained() or _initial(config)
    tokenizer = load_tokenizer(model_dir, config.rollout)
    agreement.check(model_dir, tokenizer)
    context = engine.find_plugin(pool.engine).context_length(config)
    sampler = engine.make_lone_sampler(config, pool, model_dir)
    asyncio.run(_serve(config, sampler, model_dir, tokenizer, context))


def _trained() -> Path | None:
    """Returns the exported model of the run in --workdir, or None if there is none yet."""
    export = Path(main.FLAGS.workdir or "") / "export"
    return export if main.FLAGS.workdir and (export / "config.json").is_file() else None


def _initial(config: Config) -> Path:
    from rljax.hf.model_directory import prepare_model_directory

    why = "that of the run whose model is served, or a directory for the one that actor.init_from_scratch makes"
    workdir = main.workdir_from_flags(why) if config.actor.init_from_scratch else Path()
    return prepare_model_directory(config.actor, workdir / "init", seed=config.seed)


async def _serve(config: Config, sampler: Sampler, model_dir: Path, tokenizer: HFTokenizer, context: int | None) -> None:
    from rljax.agents import Dialogue, Endpoint, Guest, SamplingPolicy
    from rljax.engines.http.server import SamplerServer, ServerOptions, is_loopback
    from rljax.errors import UserError
    from rljax.messaging.token import VARIABLE, UnsafeToken, own_token, token_file
    from rljax.workflows import sampling_params

    settings = config.serve
    try:
        token = own_token()
    except UnsafeToken as error:
        raise UserError(str(error)) from None
    roots = settings.weight_roots or ("/dev/shm", tempfile.gettempdir())
    guest = Guest(sampler, SamplingPolicy(sampling_params(config.gconfig, tokenizer), fixed=False), token)
    endpoint = Endpoint(
        Dialogue(tokenizer, settings.tool_parser, settings.reasoning_parser),
        settings.model_name or model_dir.resolve().name,
        guest=guest,
        most_requests=settings.max_requests,
    )
    options = ServerOptions(
        model_path=str(model_dir.resolve()),
        weight_roots=[Path(root) for root in roots],
        token=token,
        max_requests=settings.max_requests,
        max_body=int(settings.max_body_mb * 2**20),
        context_length=context,
    )
    server = SamplerServer(sampler, options, tokenizer, endpoint)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        try:
            host, port = await server.start(settings.host, settings.port)
        except OSError as error:
            raise UserError(f"serve.port: cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
        if not is_loopback(settings.host):
            logging.warning("serve.host: requests and the token travel unencrypted to %s (use a network of your own)", host)
        if VARIABLE not in os.environ:
            logging.info("clients need the token in %s (or %s in the environment of both)", token_file(), VARIABLE)
        print(f"serving {model_dir} at {host}:{port}", flush=True)
        await stopped.wait()
    finally:
        await server.close()
        await sampler.close()


if __name__ == "__main__":
    main.run_main(serve)
