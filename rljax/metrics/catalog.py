"""Metrics that a run writes: their names, units and meanings, and the page that lists them.

python -m rljax.metrics.catalog > docs/metrics.md

A `*` in a name stands for what the run decides: a reward's component, a lag, a kind of failure.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    """Metric, or a family of them.

    Example: Metric("rollout/staleness", "versions", "Lag of the trained tokens.", True)
    """

    name: str
    unit: str
    meaning: str
    is_distribution: bool = False  # written as /avg, /min and /max


class Family(NamedTuple):
    """Metrics that belong together, and when a run writes them."""

    title: str
    when: str
    metrics: tuple[Metric, ...]


PER_STEP, SECONDS, SHARE, NATS = "per step", "s per step", "share", "nats per token"
REWARD = "reward units"
ROUNDED_AWAY = (
    "Of the weights that an update moved: those whose value in the dtype that the sampler gets stayed the same. 0 in float32;"
    " near 1 in bfloat16 at small learning rates, where a weight's updates show once they add up to its rounding."
)

FAMILIES = (
    Family(
        "Rewards and groups",
        "at every RL step, of the batch that is trained on",
        (
            Metric("rollout/reward", REWARD, "Reward of a completion, as the reward function gave it.", True),
            Metric(
                "rollout/finished_reward",
                REWARD,
                "The same of all groups that finished since the last step, rejected ones too.",
                True,
            ),
            Metric("reward/*", REWARD, "Component of the reward by its name.", True),
            Metric("reward/overlong_penalty", REWARD, "Penalty of completions near the length limit.", True),
            Metric("ppo/actor/task_reward", REWARD, "Reward before shaping.", True),
            Metric(
                "ppo/actor/shaped_reward",
                REWARD,
                "Reward after bias, scale, clip and penalties: what advantages are made of.",
                True,
            ),
            Metric("rollout/group_reward_std", REWARD, "Standard deviation of the rewards within a group.", True),
            Metric("rollout/equal_reward_groups", "share of groups", "Groups whose rewards are all equal: they teach nothing."),
            Metric(
                "rollout/all_right_groups",
                "share of groups",
                "Of all that finished since the last step, rejected ones too: every reward is at least `evaluator.success`.",
            ),
            Metric("rollout/all_wrong_groups", "share of groups", "Of the same: no reward is."),
            Metric("rollout/reward_length_corr", "correlation", "Pearson's correlation of reward and length over the batch."),
            Metric("rollout/groups", PER_STEP, "Groups in the batch."),
            Metric(
                "rollout/prompt_tokens", "tokens " + PER_STEP, "Of the batch that no policy sampled: prompts, tool results."
            ),
            Metric("rollout/completion_tokens", "tokens " + PER_STEP, "Of the batch that the policy sampled."),
            Metric("rollout/trained_tokens", "tokens " + PER_STEP, "In the loss; of supervised steps too."),
            Metric(
                "rollout/group_size",
                "episodes",
                "Episodes in a group; fewer than `gconfig.n_samples` where some failed or were rejected.",
                True,
            ),
        ),
    ),
    Family(
        "Completions",
        "at every RL step, of the batch that is trained on",
        (
            Metric("ppo_actor/seq_len", "tokens", "Sampled tokens of a completion.", True),
            Metric("ppo_actor/no_eos_ratio", "share of completions", "Cut at the length limit, by the finish reason."),
            Metric("rollout/repetition", "share of 4-grams", "4-grams of a completion that occurred before in it.", True),
            Metric("rollout/distinct_completions", "share of a group", "Completions of a group that differ.", True),
            Metric("rollout/duplicate_prompts", "share of groups", "Groups whose prompt another group of the batch has."),
            Metric("rollout/foreign_tokens_in_loss", "tokens", "Tokens in the loss that no sampler drew."),
            Metric(
                "rollout/behavior_logp", "nats", "Log-probability of a trained token under the policy that sampled it.", True
            ),
        ),
    ),
    Family(
        "Freshness",
        "at every RL step",
        (
            Metric("rollout/staleness", "versions", "Lag of the trained tokens.", True),
            Metric("rollout/lag_*", "share of trained tokens", "Tokens of that lag."),
            Metric("rollout/stale", "groups " + PER_STEP, "Too old when finished: generated again, or masked."),
            Metric("rollout/stale_tokens", "tokens " + PER_STEP, "Masked because they were too old."),
            Metric("ppo_actor/behave_log_ratio", "nats", "Log-ratio of the proximal to the behavior policy.", True),
            Metric(
                "ppo_actor/behave_log_ratio_lag0",
                "nats",
                "Its mean over tokens of lag 0: how far sampler and learner disagree.",
            ),
            Metric("ppo_actor/behave_log_ratio_p01", "nats", "Its quantile 0.01."),
            Metric("ppo_actor/behave_log_ratio_p50", "nats", "Its median."),
            Metric("ppo_actor/behave_log_ratio_p99", "nats", "Its quantile 0.99."),
        ),
    ),
    Family(
        "The update",
        "at every RL step, over its minibatches; means over tokens are over all trained ones",
        (
            Metric("ppo_actor/advantage", "standard deviations, or reward units", "Advantage of a trained token.", True),
            Metric("ppo_actor/kl_reward", REWARD, "KL penalty in the reward, with `actor.kl_placement=reward`."),
            Metric("ppo_actor/update/loss", "1", "Loss that was minimized."),
            Metric("ppo_actor/update/grad_norm", "1", "Global norm of the gradient, before clipping."),
            Metric("ppo_actor/update/lr", "1", "Learning rate."),
            Metric("ppo_actor/update/optimizer_steps", "steps", "Updates that the optimizer's moments have seen."),
            Metric("ppo_actor/update/rounded_away", "share of weights", ROUNDED_AWAY),
            Metric("ppo_actor/update/skipped", "share of updates", "Left out because the gradient was not finite."),
            Metric(
                "ppo_actor/update/out_of_bounds",
                "share of updates",
                "Left out by a guardrail, where a bound's action is `skip`.",
            ),
            Metric(
                "ppo_actor/update/importance_weight",
                "1",
                "Ratio of current to proximal policy before the clip, of a token or, at that level, of its sequence.",
                True,
            ),
            Metric("ppo_actor/update/behave_imp_weight", "1", "Ratio of proximal to behavior policy, of a token.", True),
            Metric(
                "ppo_actor/update/applied_weight",
                "1",
                "Weight by that ratio that multiplied a token's loss: at `actor.behav_imp_weight_level`, capped.",
                True,
            ),
            Metric(
                "ppo_actor/update/behave_cap_ratio",
                "share of tokens",
                "Whose weight, at its level, is above `actor.behav_imp_weight_cap`.",
            ),
            Metric("ppo_actor/update/clip_ratio", "share of tokens", "Whose loss the clip changed."),
            Metric("ppo_actor/update/approx_kl", NATS, "KL divergence of the current from the proximal policy (k3), by token."),
            Metric("ppo_actor/update/entropy", NATS, "Entropy of the policy."),
            Metric("ppo_actor/update/reference_kl", NATS, "KL divergence from the reference, where it is in the loss."),
            Metric("ppo_actor/update/teacher_kl", NATS, "KL divergence from the teacher, in distillation."),
            Metric(
                "ppo_actor/update/proximal_error",
                "nats",
                "Error of an interpolated proximal policy, with `actor.prox_logp_error`.",
                True,
            ),
            *(
                Metric(f"ppo_actor/with_advantage/{name}", unit, "The same over the tokens whose advantage is not 0.", spread)
                for name, unit, spread in (
                    ("importance_weight", "1", True),
                    ("behave_imp_weight", "1", True),
                    ("clip_ratio", "share of them", False),
                    ("approx_kl", NATS, False),
                    ("entropy", NATS, False),
                    ("reference_kl", NATS, False),
                    ("teacher_kl", NATS, False),
                )
            ),
            Metric("ppo_actor/with_advantage/share", "share of trained tokens", "Tokens whose advantage is not 0."),
            Metric("ppo_actor/update/nll", NATS, "Negative log-likelihood, of a learner's supervised update."),
        ),
    ),
    Family(
        "Critic",
        "at every RL step of a run with a critic (`actor.adv_estimator=gae`)",
        (
            Metric("critic/explained_variance", "share of the returns' variance", "Explained by the values."),
            Metric("critic/value", REWARD, "Value before a token.", True),
            Metric("critic/return", REWARD, "Target of the value.", True),
            Metric("critic/squared_error", REWARD + " squared", "Of value and return."),
            Metric("critic/squared_return", REWARD + " squared", "Of the return."),
            Metric("critic/loss", REWARD + " squared", "Loss that was minimized."),
            Metric("critic/clip_ratio", "share of tokens", "Value clipped."),
            Metric("critic/grad_norm", "1", "Global norm of the gradient, before clipping."),
            Metric("critic/lr", "1", "Learning rate."),
            Metric("critic/optimizer_steps", "steps", "Updates that the optimizer's moments have seen."),
            Metric("critic/skipped", "share of updates", "Left out because the gradient was not finite."),
        ),
    ),
    Family(
        "Supervised steps",
        "at every step of a warm-up (`warmup/`) or of SFT (`sft/`)",
        tuple(
            Metric(f"{phase}/{name}", unit, meaning)
            for phase in ("warmup", "sft")
            for name, unit, meaning in (
                ("loss", NATS, "Loss that was minimized."),
                ("nll", NATS, "Negative log-likelihood of the trained tokens."),
                ("entropy", NATS, "Entropy of the policy."),
                ("grad_norm", "1", "Global norm of the gradient, before clipping."),
                ("lr", "1", "Learning rate."),
                ("optimizer_steps", "steps", "Updates that the optimizer's moments have seen."),
                ("rounded_away", "share of weights", ROUNDED_AWAY),
                ("skipped", "share of updates", "Left out because the gradient was not finite."),
                ("out_of_bounds", "share of updates", "Left out by a guardrail."),
            )
        ),
    ),
    Family(
        "Evaluation",
        "at the steps that are evaluated; those of a set of `valid_datasets` with its name, as `eval-rollout/math/reward`",
        (
            Metric("eval-rollout/pass@*", "share of prompts", "Chance that one of so many samples passes, for `evaluator.ks`."),
            Metric("eval-rollout/version", "versions", "Of the weights that sampled a token.", True),
            Metric("eval-rollout/reward", REWARD, "Reward of a held-out completion; failed episodes are left out.", True),
            Metric("eval-reward/*", REWARD, "Component of it by its name.", True),
            Metric("eval-rollout/seq_len", "tokens", "Sampled tokens of a completion.", True),
            Metric("eval-rollout/no_eos_ratio", "share of completions", "Cut at the length limit."),
            Metric("eval-rollout/failed", "episodes", "Failed, of any kind."),
            Metric("eval-rollout/failed/*", "episodes", "Failed, by kind."),
            Metric("eval-rollout/lost/*", "requests", "Lost by the sampler and sent again, by kind."),
        ),
    ),
    Family(
        "Prompts and failures",
        "at every RL step, counted since the last",
        (
            Metric(
                "rollout/rejected",
                "groups " + PER_STEP,
                "Finished and not wanted (`rollout.should_accept_fn`, or the workflow).",
            ),
            Metric("rollout/dropped", "prompts " + PER_STEP, "Given up after `recover.max_prompt_failures` failures."),
            Metric("rollout/again", "prompts " + PER_STEP, "Put back, to be generated again."),
            Metric("rollout/failed/*", "episodes " + PER_STEP, "Failed, by kind ([failures](runtime.md#failures))."),
            Metric("rollout/retried/*", "rewards " + PER_STEP, "Attempts that failed and were repeated, by kind."),
            Metric("rollout/lost/*", "requests " + PER_STEP, "Lost by a server or a worker, by kind."),
            Metric("rollout/late_groups", "groups " + PER_STEP, "Of workers whose lease had ended: not taken."),
            Metric("rollout/running", "prompts", "In flight, after the step."),
            Metric("rollout/ready", "groups", "Waiting for the learner, after the step."),
            Metric("rollout/workers", "workers", "Attached."),
        ),
    ),
    Family(
        "Time and resources",
        "at every step",
        (
            Metric("timeperf/wall", SECONDS, "From the last step's end to this one's, waits, evaluations and saves included."),
            Metric("timeperf/step", SECONDS, "Update and publish."),
            *(
                Metric(f"timeperf/{phase}", SECONDS, meaning)
                for phase, meaning in (
                    ("pack", "Packing rows."),
                    ("score", "Scoring by the policy before the update."),
                    ("reference", "Scoring by the reference."),
                    ("teacher", "Scoring by the teacher."),
                    ("values", "The critic's values."),
                    ("advantages", "Advantages."),
                    ("update", "Updates of the policy."),
                    ("update_critic", "Updates of the critic."),
                    ("publish", "From learner to sampler."),
                    ("record", "Metrics and histograms of the batch."),
                    ("evaluate", "Evaluation."),
                    ("save", "What the step waited for a checkpoint: its beginning, or all of it without `saver.background`."),
                    ("save_wait", "Of that, for the checkpoint before to be whole."),
                    ("save_copy", "An update waited for a checkpoint's copy of the learner; part of `timeperf/update`."),
                    ("save_background", "Checkpoints that became whole: from the beginning of each to its rename."),
                )
            ),
            Metric("timeperf/reward", "s per completion", "Scoring, without the wait for a process.", True),
            Metric("timeperf/update_tokens_per_s", "tokens/s", "Through updates, while they ran."),
            Metric(
                "timeperf/generated_tokens_per_s",
                "tokens/s",
                "Sampled in groups that finished, wanted or not, per second of `timeperf/wall`.",
            ),
            Metric(
                "timeperf/sampler_tokens_per_s",
                "tokens/s",
                "The same, per second in which a request was under way; not with workers.",
            ),
            Metric(
                "timeperf/learner_tokens_per_s",
                "tokens/s",
                "Tokens of the batch, per second of all scoring and updates of policy and critic.",
            ),
            Metric("timeperf/trained_tokens_per_s", "tokens/s", "`rollout/trained_tokens` per second of `timeperf/wall`."),
            Metric("timeperf/update_mfu", "share of the peak", "Model FLOPs of updates, where the device's peak is known."),
            Metric("timeperf/rank_spread", SHARE, "How uneven the work of several ranks was.", True),
            Metric("rollout/wait/learner", SECONDS, "The learner waited for a batch."),
            Metric(
                "rollout/wait/producer_for_*", SECONDS, "The producer waited: for `lag`, `concurrency`, `data` or `workers`."
            ),
            Metric("perf/host_memory_bytes", "bytes", "Of this process in RAM."),
            Metric("perf/device_memory_bytes", "bytes", "In use on the learner's devices, where they tell."),
            Metric("memory/learner_peak_bytes", "bytes", "Most in use so far on the fullest of the learner's devices."),
            Metric(
                "memory/sampler_peak_bytes",
                "bytes",
                "The same of the sampler's; of SGLang its weights, cache and graphs, as it says itself.",
            ),
        ),
    ),
    Family(
        "Shadow",
        "at steps at which the shadow was done with a batch, of an earlier step, or was given one",
        (
            Metric("parity/logp_error", "nats", "Largest difference of a trained token's log-prob."),
            Metric("parity/loss_error", SHARE, "Difference of the loss, over the sum of its terms' sizes."),
            Metric("parity/grad_norm_error", SHARE, "Difference of the gradient norm, over the norm."),
            Metric("parity/excess", "bounds", "Largest of the three over its bound ([parity](parity.md))."),
            Metric("parity/dropped", "batches", "Not handed over, because the shadow was at work."),
            Metric("timeperf/shadow", "s per batch", "The learner saved and scored for the shadow."),
        ),
    ),
    Family(
        "Guardrails",
        "at steps at which one acted",
        (Metric("guard/*", "actions " + PER_STEP, "By action ([guardrails](runtime.md#guardrails))."),),
    ),
)
_OF_A_SET = re.compile("^(eval-rollout/|eval-reward/)[^/]+/")  # of valid_datasets
ENDS = ("avg", "min", "max")  # of the names of a distribution in metrics.jsonl


def find(written: str) -> Metric | None:
    """Returns the metric of a name as metrics.jsonl has it; None if there is none."""
    return _find(written) or _find(_OF_A_SET.sub(r"\1", written))


def _find(written: str) -> Metric | None:
    base, _, end = written.rpartition("/")
    exact = {True: base, False: written}
    for is_distribution in (True, False):
        if is_distribution and end not in ENDS:
            continue
        for metric, pattern in _patterns():
            if metric.is_distribution is is_distribution and pattern.fullmatch(exact[is_distribution]):
                return metric
    return None


@functools.cache
def _patterns() -> tuple[tuple[Metric, re.Pattern[str]], ...]:
    """Returns all metrics with their patterns, exact names first."""
    metrics = sorted(itertools.chain(*(family.metrics for family in FAMILIES)), key=lambda metric: "*" in metric.name)
    return tuple((metric, re.compile(re.escape(metric.name).replace(r"\*", ".+"))) for metric in metrics)


_INTRODUCTION = """\
# Every metric of a run

Written by `python -m rljax.metrics.catalog` (`rljax/metrics/catalog.py`); don't edit it.

`metrics.jsonl` has one object per step, and TensorBoard and W&B the same names. A metric marked as a distribution is written
as `NAME/avg`, `NAME/min` and `NAME/max`; the rules of [the doctor](doctor.md) call its mean `NAME`. `*` stands for a name that
the run decides. Means are over all tokens, completions or groups of a step: never means of means. A metric that a step has no
value for is left out; `null` is NaN or infinite.
"""


def page() -> str:
    """Returns the text of docs/metrics.md."""
    return "\n".join([_INTRODUCTION, *(_section(family) for family in FAMILIES)])


def _section(family: Family) -> str:
    return "\n".join([f"## {family.title}", "", f"Written {family.when}.", "", *_table(family.metrics), ""])


def _table(metrics: Iterable[Metric]) -> list[str]:
    rows = [("metric", "unit", "meaning"), ("---", "---", "---")]
    for metric in metrics:
        spread = " (distribution)" if metric.is_distribution else ""
        rows.append((f"`{metric.name}`{spread}", metric.unit, metric.meaning))
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    print(page(), end="")
