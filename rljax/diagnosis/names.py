"""Names of the metrics that rules read, as metrics.jsonl has them."""

import re

from rljax.diagnosis.history import EVALUATION_REWARD, REWARD

__all__ = ["EVALUATION_REWARD", "REWARD"]

# Rewards and groups
SHAPED_REWARD = "ppo/actor/shaped_reward"
GROUP_REWARD_STD = "rollout/group_reward_std"
EQUAL_REWARD_GROUPS = "rollout/equal_reward_groups"
REWARD_LENGTH_CORRELATION = "rollout/reward_length_corr"
COMPONENTS = "reward/"
# Components that workflows count, and that score nothing
COUNTS = frozenset(
    {"turns", "context_full", "prefix_breaks", "tool_calls", "tool_error", "tool_timeout", "unknown_tool", "bad_arguments"}
)
GROUPS = "rollout/groups"
GROUP_SIZE = "rollout/group_size"

# Completions
SEQUENCE_LENGTH = "ppo_actor/seq_len"
EVALUATION_LENGTH = "eval-rollout/seq_len"
NO_EOS_RATIO = "ppo_actor/no_eos_ratio"
REPETITION = "rollout/repetition"
DISTINCT_COMPLETIONS = "rollout/distinct_completions"
DUPLICATE_PROMPTS = "rollout/duplicate_prompts"
FOREIGN_TOKENS = "rollout/foreign_tokens_in_loss"
BEHAVIOR_LOGP = "rollout/behavior_logp"

# The update
ADVANTAGE = "ppo_actor/advantage"
LOSS = "ppo_actor/update/loss"
APPROX_KL = "ppo_actor/update/approx_kl"
CLIP_RATIO = "ppo_actor/update/clip_ratio"
ENTROPY = "ppo_actor/update/entropy"
GRAD_NORM = "ppo_actor/update/grad_norm"
LEARNING_RATE = "ppo_actor/update/lr"
IMPORTANCE_WEIGHT = "ppo_actor/update/importance_weight"
BEHAVE_WEIGHT = "ppo_actor/update/behave_imp_weight"
BEHAVE_CAP_RATIO = "ppo_actor/update/behave_cap_ratio"
REFERENCE_KL = "ppo_actor/update/reference_kl"
SKIPPED = "ppo_actor/update/skipped"
OPTIMIZER_STEPS = "ppo_actor/update/optimizer_steps"
BEHAVE_LOG_RATIO = "ppo_actor/behave_log_ratio"
BEHAVE_LOG_RATIO_LAG0 = "ppo_actor/behave_log_ratio_lag0"

# Critic
EXPLAINED_VARIANCE = "critic/explained_variance"
CRITIC_LOSS = "critic/loss"
VALUE = "critic/value"
RETURN = "critic/return"

# Evaluation
EVALUATION_FAILED = "eval-rollout/failed"
EVALUATION_COMPONENTS = "eval-reward/"

# Freshness
STALENESS = "rollout/staleness"
STALE = "rollout/stale"
REJECTED = "rollout/rejected"
FAILED = "rollout/failed/"
FAILED_TIMEOUTS = "rollout/failed/reward_timeout"
RETRIED_TIMEOUTS = "rollout/retried/reward_timeout"

# Resources
WALL = "timeperf/wall"
STEP = "timeperf/step"
REWARD_SECONDS = "timeperf/reward"
LEARNER_WAIT = "rollout/wait/learner"
PRODUCER_WAIT = "rollout/wait/producer_for_lag"
HOST_MEMORY = "perf/host_memory_bytes"
DEVICE_MEMORY = "perf/device_memory_bytes"

_COSTS = re.compile(r"cost|distance|error|fail|latency|loss|penalty|seconds|timeout|violation")


def is_score(component: str) -> bool:
    """Returns whether a component of the reward is one of which more is better.

    A count of a workflow is none, nor is one whose name says that it is a cost.

    Args:
      component: its name, with or without `COMPONENTS` before it.
    """
    name = component.removeprefix(COMPONENTS)
    return name not in COUNTS and not _COSTS.search(name.lower())
