"""The catalog of metrics has what runs write and what rules read, and nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rljax import loop
from rljax.diagnosis import RULES, names
from rljax.diagnosis.history import LINE_FILES
from rljax.diagnosis.report import plans
from rljax.engines.fake import model
from rljax.experiments.bench.run_library import kept
from rljax.metrics import catalog
from rljax.metrics.guardrails import GUARDS
from rljax.testing.harness import STOP, VOCAB, MemorySink, Trouble, make_run, worker
from tests.shared import REPOSITORY

# Of hardware or of failures that the runs below don't have
NOT_HERE = {
    *(
        "timeperf/update_mfu",
        "timeperf/rank_spread",
        "timeperf/save_copy",
        "perf/device_memory_bytes",
        "memory/learner_peak_bytes",
        "memory/sampler_peak_bytes",
        "timeperf/learner_tokens_per_s",  # of learners that count tokens
    ),
    *("warmup/skipped", "sft/skipped", "critic/optimizer_steps"),
    *("rollout/late_groups", "eval-rollout/lost/*"),
    *(metric.name for family in catalog.FAMILIES if family.title == "Shadow" for metric in family.metrics),
    *("ppo_actor/update/nll", "sft/out_of_bounds", "warmup/out_of_bounds"),
    *("ppo_actor/update/rounded_away", "sft/rounded_away", "warmup/rounded_away"),
}
PPO = {"actor.adv_estimator": "gae", "actor.reward_norm.mean_level": "none", "actor.reward_norm.std_level": "none"}
OF_JAX = ("ppo", "grpo_kl", "timeouts_as_zeros", "failing_evaluations")
RUNS = {
    "plain": {},
    "critic": PPO,
    "sft": {"actor.loss": "sft"},
    "warm-up": {"warmup.steps": 2},
    "interpolated": {"actor.prox_logp_method": "loglinear", "actor.prox_logp_error": True, "actor.recompute_logprob": False},
    "overlong": {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 2, "actor.overlong_penalty_factor": 1.0},
    "KL in the reward": {"actor.kl_ctl": 0.1, "actor.kl_estimator": "k1", "actor.kl_placement": "reward"},
    "KL in the loss": {"actor.kl_ctl": 0.1},
    "skipping": {"guard.actions": {"max_grad_norm": "skip"}, "guard.max_grad_norm": 1e-9},
}


def written_by_fake(tmp_path) -> set[str]:
    """Names that runs on the fake engine write, a few steps of each kind."""
    sinks = []

    def sink(first_step):
        sinks.append(MemorySink(first_step))
        return sinks[-1]

    short = {"total_train_steps": 2, "evaluator.freq_steps": 1, "saver.freq_steps": 1, "evaluator.ks": [1]}
    for name, overrides in RUNS.items():
        loop.train(make_run(tmp_path / name, short | overrides, sink=sink))
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, STOP] = 7.0
    model.write(tmp_path / "teacher", table)
    taught = {"actor.distill.teacher": str(tmp_path / "teacher")}
    loop.train(make_run(tmp_path / "taught", short | taught, sink=sink))
    troubled = Trouble(np.random.default_rng(1), failure_rate=0.2)
    loop.train(make_run(tmp_path / "troubled", {"rollout.request_retries": 9}, n_prompts=24, trouble=troubled, sink=sink))
    run = make_run(tmp_path / "workers", short, by_workers=True, sink=sink)

    async def together():
        await asyncio.gather(loop.Loop(run).run(), worker(tmp_path / "workers"))

    asyncio.run(together())
    return {name for each in sinks for line in each.steps.values() for name in line}


def written_by_jax() -> set[str]:
    """Names that kept runs of the library wrote, on the JAX path."""
    runs = list(kept.read(REPOSITORY / "tests/data/runs/tuning.jsonl.xz", only=OF_JAX))
    assert len(runs) == len(OF_JAX)
    return {name for run in runs for row in run.files["metrics.jsonl"] for name in row if name != "step"}


def test_every_metric_that_runs_write_is_in_the_catalog_and_every_one_of_it_is_written(tmp_path):
    written = written_by_fake(tmp_path) | written_by_jax()
    found = {name: catalog.find(name) for name in written}
    assert [name for name, metric in found.items() if metric is None] == []
    listed = {metric.name for family in catalog.FAMILIES for metric in family.metrics}
    assert listed - {metric.name for metric in found.values()} == NOT_HERE


def test_what_rules_guardrails_and_figures_read_is_in_the_catalog():
    read = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    read |= {need for rule in RULES for need in rule.needs} | {guard.metric for guard in GUARDS}
    read |= {metric for section in (*plans.SECTIONS, plans.SUPERVISED) for plan in section.plans for metric in plan.metrics}
    read |= plans.HISTOGRAMS.keys()
    listed = {metric.name for family in catalog.FAMILIES for metric in family.metrics}
    families = {f"{name}*" for name in read if name.endswith("/")}  # of names
    found = {name for name in read for end in ("", *(f"/{end}" for end in catalog.ENDS)) if catalog.find(f"{name}{end}")}
    assert {name for name in read - found if name not in LINE_FILES and f"{name}*" not in families & listed} == set()


def test_names_are_unique_and_sentences_end():
    metrics = [metric for family in catalog.FAMILIES for metric in family.metrics]
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert all(metric.unit and metric.meaning.endswith((".", ").")) for metric in metrics)


@pytest.mark.parametrize("name", ["reward/avg", "pass@4", "failed/reward_error", "version/max"])
def test_metrics_of_a_named_set_are_those_of_any(name):
    assert catalog.find(f"eval-rollout/math/{name}") is catalog.find(f"eval-rollout/{name}") is not None


@pytest.mark.parametrize("name", ["rollout/reward", "rollout/rewards/avg", "timeperf/updates", "ppo_actor/update/lr/avg"])
def test_a_name_that_nothing_writes_is_not_found(name):
    assert catalog.find(name) is None


def test_the_page_is_written_from_the_catalog():
    assert (REPOSITORY / "docs/metrics.md").read_text() == catalog.page(), "python -m rljax.metrics.catalog > docs/metrics.md"
