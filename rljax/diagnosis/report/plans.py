"""Plans of figures: which metrics of a run are drawn, how, and in which section of the page.

A plan's metrics are names, or prefixes that end in `*`. A figure of which the run recorded nothing
is left out, and the page names it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Literal

# Phases that follow each other in a step, the longest first; the others under timeperf/ are their parts or sums
PHASES = (
    *("update", "update_critic", "score", "values", "reference", "teacher"),
    *("publish", "evaluate", "save", "pack", "advantages", "record"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Figure to draw if the run has its metrics."""

    id: str
    title: str
    unit: str  # of the vertical axis
    metrics: Mapping[str, str]  # name or pattern -> label; * in a label stands for what the pattern's * matched
    caption: str = ""
    kind: Literal["lines", "bands", "areas"] = "lines"  # bands shade the range of each distribution
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    id: str
    title: str
    plans: tuple[Plan, ...]


SECTIONS = (
    Section(
        "outcome",
        "Reward",
        (
            Plan(
                "reward",
                "Reward",
                "mean reward",
                {"rollout/reward": "training", "eval-rollout/reward": "held-out"},
                "Training: completions trained on. Held-out: evaluations, at their own sampling parameters.",
            ),
            Plan(
                "components",
                "Reward components",
                "mean",
                {"reward/*": "*", "eval-reward/*": "* (held-out)"},
                "Components that move apart from their sum show which part of the reward is being learned.",
            ),
            Plan(
                "shaping",
                "Reward before and after shaping",
                "mean reward",
                {"ppo/actor/task_reward": "task", "ppo/actor/shaped_reward": "shaped", "ppo_actor/kl_reward": "KL term"},
            ),
            Plan(
                "group-spread",
                "Spread within groups",
                "std of reward within a group",
                {"rollout/group_reward_std": "std"},
                "A group without spread has no advantage, and teaches nothing.",
                kind="bands",
            ),
            Plan(
                "equal-groups",
                "Groups that teach nothing",
                "share of groups",
                {"rollout/equal_reward_groups": "all rewards equal", "rollout/duplicate_prompts": "prompt twice in the batch"},
            ),
            Plan("advantage", "Advantage", "advantage", {"ppo_actor/advantage": "advantage"}, kind="bands"),
        ),
    ),
    Section(
        "text",
        "Completions",
        (
            Plan(
                "length",
                "Length",
                "tokens per completion",
                {"ppo_actor/seq_len": "training", "eval-rollout/seq_len": "held-out"},
                kind="bands",
            ),
            Plan(
                "truncated",
                "Cut at the length limit",
                "share of completions",
                {"ppo_actor/no_eos_ratio": "training", "eval-rollout/no_eos_ratio": "held-out"},
            ),
            Plan(
                "diversity",
                "Repetition and diversity",
                "share",
                {
                    "rollout/repetition": "4-grams seen before",
                    "rollout/distinct_completions": "distinct completions in a group",
                },
            ),
            Plan(
                "reward-length",
                "Correlation of reward and length",
                "Pearson's r",
                {"rollout/reward_length_corr": "reward and length"},
                "Far from 0, the policy is paid for length, or for brevity.",
            ),
        ),
    ),
    Section(
        "policy",
        "Policy",
        (
            Plan("entropy", "Entropy", "nats per token", {"ppo_actor/update/entropy": "entropy"}),
            Plan("kl", "KL of an update", "nats per token", {"ppo_actor/update/approx_kl": "approx_kl"}, log=True),
            Plan("clip", "Clipped tokens", "share of tokens", {"ppo_actor/update/clip_ratio": "clip_ratio"}),
            Plan("grad-norm", "Gradient norm, before clipping", "norm", {"ppo_actor/update/grad_norm": "grad_norm"}, log=True),
            Plan("loss", "Loss", "loss", {"ppo_actor/update/loss": "loss"}),
            Plan("lr", "Learning rate", "learning rate", {"ppo_actor/update/lr": "lr"}),
            Plan(
                "importance-weight",
                "Importance weight",
                "ratio",
                {"ppo_actor/update/importance_weight": "current / proximal"},
                "Exactly 1 at one minibatch per step.",
                kind="bands",
                log=True,
            ),
            Plan(
                "behavior-weight",
                "Behavior importance weight",
                "ratio",
                {"ppo_actor/update/behave_imp_weight": "proximal / behavior"},
                "1 where sampler and learner hold the same weights and agree.",
                kind="bands",
                log=True,
            ),
            Plan(
                "log-ratio",
                "Log-ratio of proximal to behavior policy",
                "nats",
                {
                    "ppo_actor/behave_log_ratio_p01": "1st percentile",
                    "ppo_actor/behave_log_ratio_p50": "median",
                    "ppo_actor/behave_log_ratio_p99": "99th percentile",
                    "ppo_actor/behave_log_ratio_lag0": "mean at lag 0",
                },
                "At lag 0 the weights are the same: what is left there is disagreement of sampler and learner.",
            ),
        ),
    ),
    Section(
        "critic",
        "Critic",
        (
            Plan(
                "explained-variance",
                "Explained variance",
                "explained variance",
                {"critic/explained_variance": "explained variance"},
                "1: the values are the returns. Under 0: worse than a constant.",
            ),
            Plan("critic-loss", "Value loss", "loss", {"critic/loss": "loss"}, log=True),
            Plan("values", "Values and returns", "reward", {"critic/value": "value", "critic/return": "return"}, kind="bands"),
        ),
    ),
    Section(
        "freshness",
        "Lag and idle",
        (
            Plan(
                "lag",
                "Trained tokens by lag",
                "share of tokens",
                {"rollout/lag_*": "lag *"},
                "Lag: versions between the policy that sampled a token and the policy that trains on it.",
                kind="areas",
            ),
            Plan(
                "idle",
                "Waiting, by side",
                "seconds per step",
                {"rollout/wait/learner": "learner, for rollouts", "rollout/wait/producer_for_*": "producer, for *"},
                "A side that always waits has too much hardware, or the other too little.",
            ),
            Plan(
                "prompts",
                "Prompts that came to nothing",
                "prompts per step",
                {
                    "rollout/rejected": "rejected by the filter",
                    "rollout/stale": "too old",
                    "rollout/dropped": "dropped",
                    "rollout/again": "generated again",
                    "rollout/lost/*": "lost: *",
                    "rollout/failed/*": "failed: *",
                },
            ),
            Plan(
                "phases",
                "Where a step's time goes",
                "seconds per step",
                {f"timeperf/{phase}": phase.replace("_", " ") for phase in PHASES},
                kind="areas",
            ),
        ),
    ),
    Section(
        "numbers",
        "Numbers and resources",
        (
            Plan(
                "behavior-logp", "Log-prob of trained tokens", "nats", {"rollout/behavior_logp": "behavior_logp"}, kind="bands"
            ),
            Plan(
                "foreign",
                "Trained tokens that no sampler drew",
                "tokens per step",
                {"rollout/foreign_tokens_in_loss": "tokens"},
                "Anything above 0 is a fault: prompt, padding or tool tokens in the loss.",
            ),
            Plan("throughput", "Learner throughput", "tokens per second", {"timeperf/update_tokens_per_s": "tokens/s"}),
            Plan("mfu", "Model FLOP utilization", "share of the peak", {"timeperf/update_mfu": "MFU"}),
            Plan(
                "memory",
                "Memory in use",
                "bytes",
                {"perf/host_memory_bytes": "host", "perf/device_memory_bytes": "devices"},
            ),
        ),
    ),
)
SUPERVISED = Section(
    "supervised",
    "Supervised",
    (
        Plan("supervised-loss", "Negative log-likelihood", "nats per token", {"warmup/nll": "warm-up", "sft/nll": "SFT"}),
        Plan(
            "supervised-grad-norm",
            "Gradient norm, before clipping",
            "norm",
            {"warmup/grad_norm": "warm-up", "sft/grad_norm": "SFT"},
            log=True,
        ),
        Plan("supervised-lr", "Learning rate", "learning rate", {"warmup/lr": "warm-up", "sft/lr": "SFT"}),
    ),
)

# Histograms over steps, and their axis
HISTOGRAMS = {
    "rollout/reward": ("Reward", "reward"),
    "ppo_actor/advantage": ("Advantage", "advantage"),
    "ppo_actor/seq_len": ("Length", "tokens per completion"),
    "ppo_actor/behave_log_ratio": ("Log-ratio of proximal to behavior policy", "nats"),
    "rollout/staleness": ("Lag", "versions"),
}


def plan_for(name: str) -> Plan:
    """Returns the plan that draws a metric; for a metric that no section has, one of its own."""
    for section in (*SECTIONS, SUPERVISED):
        for plan in section.plans:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in plan.metrics):
                return plan
    return Plan(name.replace("/", "-"), name, "value", {name: name}, kind="bands")
