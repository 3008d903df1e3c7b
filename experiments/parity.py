"""The parity certificate of a config: both learners and the samplers against a float64 oracle.

    python -m experiments.parity --config=configs/quickstart.py
    python -m experiments.parity --config=configs/smollm2_gsm8k.py --dtype=bfloat16

The engines' own learners, made as a run makes them, score one minibatch of packed rows and take a
step on it: with the config's objective, temperature, adapters and critic. Log-probs, values, loss
and the gradient of every tensor are compared with an oracle that shares no code with them:
transformers' model in float64, one sequence at a time, and the numpy definitions of
rljax/objective. So are the log-probs that the samplers of this machine give with completions of the
exported policy. The optimizers are compared with each other: the change of every tensor in that
step, and two steps in float64 on gradients of the same bits. Each difference has a bound, in
bfloat16 derived from what rounding does to transformers' model (certificate/bounds.py). --json=FILE
writes all of it. Exit status 0 if all hold, else 1. Needs the extra [torch].
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from absl import flags

from rljax.config.schema import Config
from rljax.engines.http.config import SglangConfig
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.certificate.case import make_case, with_policies_near
from rljax.experiments.certificate.report import Report, against_oracle, of_optimizers, of_sampler, of_steps

main.define_config_flags(workdir=False)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the engines' arithmetic.")
SEQUENCES = flags.DEFINE_integer("sequences", 6, "Trajectories of the minibatch.", lower_bound=1)
LENGTH = flags.DEFINE_integer("length", 64, "Most tokens of a trajectory; the first quarter is the prompt.", lower_bound=4)
JSON = flags.DEFINE_string("json", None, "File for the whole report, with all tensors.")

LEARNERS = ("jax", "fsdp")
SAMPLERS = {"jax": "jax", "fsdp": "sglang"}  # the sampler that takes a learner's weights


def parity() -> None:
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.hf.model_directory import prepare_model_directory

    config = main.config_from_flags()
    config_checks.check(config)
    if JSON.value:
        main.check_writable(Path(JSON.value))
    config = config_io.resolve(config)
    with main.scratch_directory() as scratch:
        model_dir = prepare_model_directory(config.actor, scratch / "init", seed=config.seed)
        report = certify(config, model_dir, scratch, DTYPE.value, SEQUENCES.value, LENGTH.value)
    print("\n".join(report.lines()))
    if JSON.value:
        report.write(Path(JSON.value))
    sys.exit(0 if report.holds else 1)


def certify(config: Config, model_dir: Path, scratch: Path, dtype: str, sequences: int, length: int) -> Report:
    """Runs the engines and the oracle.

    Raises UserError without torch, or for a model or a setting that an engine can't do.
    """
    try:
        from rljax.experiments.certificate import torch_optimizer
        from rljax.experiments.certificate.oracle import Oracle
    except ImportError as error:
        raise UserError(f"{error.name}: not installed (pip install 'rljax[torch]>=0.1')") from error
    from rljax.experiments.certificate import engines, jax_optimizer
    from rljax.experiments.certificate.bounds import largest_error, of_float32, of_rounding

    case = make_case(config, model_dir, dtype, sequences, length)
    oracle = Oracle(case)
    case = with_policies_near(case, oracle.logp())
    right, rounding = oracle.run(case), None if dtype == "float32" else oracle.in_dtype_of_case()
    bounds = of_rounding(case, right, rounding.run(case)) if rounding else of_float32(right)
    results, checks, left_out = {}, [], []
    for engine in LEARNERS:
        exported, sampler = scratch / f"exported-{engine}", SAMPLERS[engine]
        results[engine] = engines.run(engine, case, exported)
        checks += against_oracle(engine, bounds, results[engine], right)
        if not can_sample(sampler, case.config):
            left_out.append(
                f"{sampler}: not here, so its sampler is not in the certificate (sglang.python names its interpreter)"
            )
            continue
        sampled = engines.sample(sampler, case, exported)
        scored = engines.scored(sampled, oracle)
        bound = bounds.logp
        if rounding:  # of other tokens, so perhaps more
            bound = max(bound, largest_error(scored, engines.scored(sampled, rounding)))
        checks.append(of_sampler(sampler, bound, sampled.logp, scored))
    checks += of_steps(bounds, *(results[engine].policy for engine in LEARNERS))
    checks += of_optimizers(jax_optimizer.two_steps(case), torch_optimizer.two_steps(case))
    return Report(case, tuple(checks), tuple(left_out))


def can_sample(engine: str, config: Config) -> bool:
    """Returns whether this machine has a sampler: that of JAX, and SGLang where it is installed."""
    return engine == "jax" or bool(SglangConfig.of(config).python) or find_spec(engine) is not None


if __name__ == "__main__":
    main.run_main(parity)
