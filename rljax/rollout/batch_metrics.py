"""Metrics and histograms of a batch of groups, computed on the host in numpy.

Everything is computed on the tokens of all trajectories in one array, so a batch of thousands of
short trajectories costs no more than one of a few long ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean
from rljax.rollout.trajectories import no_eos_ratio, reward_components
from rljax.types import PROMPT_VERSION, Group, Trajectory, episode_weights

NGRAM = 4  # tokens
LOG_RATIO = "ppo_actor/behave_log_ratio"
TRAINED_TOKENS = "rollout/trained_tokens"
_MIX = np.uint64(0x9E3779B97F4A7C15)  # an odd multiplier, for hashes of n-grams


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of all trajectories of a batch, one after the other. N trajectories, T tokens."""

    token_ids: np.ndarray  # [T] int32
    mask: np.ndarray  # [T] bool: trained on
    behavior_logp: np.ndarray  # [T] float32, nats
    versions: np.ndarray  # [T] int32
    trajectory: np.ndarray  # [T] int64: index of the token's trajectory
    count: int  # trajectories

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Tokens:
        def joined(name: str, dtype: type) -> np.ndarray:
            return np.concatenate([np.zeros(0, dtype), *(getattr(t, name) for t in trajectories)])

        lengths = [len(t) for t in trajectories]
        return cls(
            token_ids=joined("token_ids", np.int32),
            mask=joined("loss_mask", np.bool_),
            behavior_logp=joined("behavior_logp", np.float32),
            versions=joined("versions", np.int32),
            trajectory=np.repeat(np.arange(len(lengths)), lengths),
            count=len(lengths),
        )

    def sampled(self) -> Tokens:
        """Returns the tokens that the policy sampled: the completions."""
        kept = self.versions != PROMPT_VERSION
        return Tokens(
            self.token_ids[kept],
            self.mask[kept],
            self.behavior_logp[kept],
            self.versions[kept],
            self.trajectory[kept],
            self.count,
        )

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens by trajectory, [N] int64."""
        return np.bincount(self.trajectory, minlength=self.count)

    def texts(self) -> list[bytes]:
        """Returns the token ids of each trajectory as bytes, to be compared."""
        ends = np.cumsum(self.lengths()).tolist()
        return [self.token_ids[start:end].tobytes() for start, end in zip([0, *ends], ends, strict=False)]


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, Mean]:
    """Returns metrics of the trajectories of a batch, as they came from the sampler.

    Args:
      version: training steps finished before this one.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    tokens = Tokens.of(trajectories)
    completions = tokens.sampled()
    rewards, lengths = np.array([t.reward for t in trajectories], np.float64), completions.lengths()
    weights = episode_weights(groups)
    lags = version - tokens.versions[tokens.mask]
    metrics = {
        "rollout/prompt_tokens": Mean(len(tokens.token_ids) - len(completions.token_ids), 1),
        "rollout/completion_tokens": Mean(len(completions.token_ids), 1),
        TRAINED_TOKENS: Mean(int(tokens.mask.sum()), 1),
        "rollout/reward": Mean.weighted(rewards, weights),  # rollout/finished_reward has the rejected ones too
        "rollout/staleness": distribution(lags),
        "rollout/repetition": distribution(repetition(completions)),
        "ppo_actor/seq_len": distribution(lengths),
        "ppo_actor/no_eos_ratio": no_eos_ratio(trajectories),
    }
    least = int(lags.min(initial=0))  # negative for a recorded batch that earlier weights train on
    for lag, count in enumerate(np.bincount(lags - least).tolist(), least):
        if count:
            metrics[f"rollout/lag_{lag}"] = Mean(count, len(lags))  # share of the trained tokens
    metrics |= _of_groups(groups, rewards, weights, completions.texts())
    metrics |= _of_trained_tokens(tokens)
    metrics["rollout/reward_length_corr"] = correlation(rewards, lengths)
    return metrics | reward_components(trajectories, weights=weights)


def _of_groups(
    groups: Sequence[Group], rewards: np.ndarray, weights: np.ndarray, completions: Sequence[bytes]
) -> dict[str, Mean]:
    """Returns how rewards and completions spread within the groups, and how many prompts repeat.

    Args:
      rewards, weights, completions: of each trajectory, in the order of the groups; an episode's
        weights add up to one.
    """
    sizes = [len(group.trajectories) for group in groups]
    ends = np.cumsum(sizes).tolist()
    distinct = [len(set(completions[end - size : end])) / size for size, end in zip(sizes, ends, strict=True)]
    prompts = [_prompt(group.trajectories[0]) for group in groups]
    times = Counter(prompts)
    return {
        "rollout/group_size": Mean.of(len(group.episodes()) for group in groups),
        "rollout/group_reward_std": distribution(_std_by_group(rewards, weights, np.array(sizes))),
        "rollout/distinct_completions": Mean.of(distinct),
        "rollout/duplicate_prompts": Mean(sum(times[prompt] > 1 for prompt in prompts), len(prompts)),
    }


def _std_by_group(values: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    group = np.repeat(np.arange(len(sizes)), sizes)
    total = np.rint(np.bincount(group, weights, len(sizes)))  # episodes
    mean = np.bincount(group, weights * values, len(sizes)) / total
    return np.sqrt(np.bincount(group, weights * (values - mean[group]) ** 2, len(sizes)) / total)


def _prompt(trajectory: Trajectory) -> bytes:
    """Returns the token ids before the first sampled one, as bytes."""
    sampled = trajectory.versions != PROMPT_VERSION
    return trajectory.token_ids[: int(sampled.argmax()) if sampled.any() else len(sampled)].tobytes()


def _of_trained_tokens(tokens: Tokens) -> dict[str, Mean]:
    logp, versions = tokens.behavior_logp[tokens.mask], tokens.versions[tokens.mask]
    finite = np.isfinite(logp)
    foreign = np.count_nonzero(~finite | (versions == PROMPT_VERSION))
    return {
        "rollout/foreign_tokens_in_loss": Mean(float(foreign), 1),
        "rollout/behavior_logp": distribution(logp[finite]),
    }


def repetition(completions: Tokens) -> np.ndarray:
    """Computes the share of each completion's 4-grams that occurred before in it.

    4-grams are told apart by a hash of 64 bits, less those that tell N completions apart.

    Returns:
      [M] float64, without the completions of fewer than four tokens.
    """
    ids, owner = completions.token_ids.astype(np.uint64), completions.trajectory
    starts = max(len(ids) - NGRAM + 1, 0)
    inside = owner[:starts] == owner[len(ids) - starts :]
    hashes = np.zeros(starts, np.uint64)
    for k in range(NGRAM):
        hashes = (hashes ^ ids[k : k + starts]) * _MIX
        hashes ^= hashes >> np.uint64(32)
    bits = np.uint64(max(completions.count - 1, 1).bit_length())  # the first bits say whose it is: one sort does for all
    keys = (hashes >> bits | owner[:starts].astype(np.uint64) << (np.uint64(64) - bits))[inside]
    keys.sort()
    total = np.bincount(owner[:starts][inside], minlength=completions.count)
    again = keys[1:][keys[1:] == keys[:-1]] >> (np.uint64(64) - bits)
    repeated = np.bincount(again.astype(np.int64), minlength=completions.count)
    return repeated[total > 0] / total[total > 0]


def correlation(a: np.ndarray, b: np.ndarray) -> Mean:
    """Computes Pearson's correlation of two arrays [N]; empty if either is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return Mean(0.0, 0)
    a, b = a - a.mean(), b - b.mean()
    return Mean(float(a @ b / np.sqrt((a @ a) * (b @ b))), 1)


def log_ratio_metrics(log_ratio: np.ndarray, lags: np.ndarray) -> dict[str, Mean]:
    """Returns the distribution of log-ratios of the proximal to the behavior policy.

    At lag 0 both have the same weights, so there it is how far sampler and learner disagree.

    Args:
      log_ratio: [T] float, nats, of the trained tokens.
      lags: [T] int, versions.
    """
    log_ratio = np.asarray(log_ratio, np.float64)
    finite = np.isfinite(log_ratio)
    log_ratio, lags = log_ratio[finite], lags[finite]
    if not log_ratio.size:
        return {}
    quantiles = np.quantile(log_ratio, (0.01, 0.5, 0.99)).tolist()
    named = {f"{LOG_RATIO}_{name}": Mean(q, 1) for name, q in zip(("p01", "p50", "p99"), quantiles, strict=True)}
    fresh = log_ratio[lags == 0]
    return named | {LOG_RATIO: distribution(log_ratio), f"{LOG_RATIO}_lag0": Mean(float(fresh.sum()), fresh.size)}


def batch_histograms(
    trajectories: Sequence[Trajectory], version: int, advantage: np.ndarray, log_ratio: np.ndarray | None
) -> dict[str, Histogram]:
    """Returns the histograms of a step, by the names of metrics.

    Args:
      version: training steps finished before this one.
      advantage, log_ratio: [T] float, of the trained tokens; None if nothing was scored.
    """
    tokens = Tokens.of(trajectories)
    values: Mapping[str, np.ndarray | None] = {
        "rollout/reward": np.array([t.reward for t in trajectories]),
        "rollout/staleness": version - tokens.versions[tokens.mask],
        "ppo_actor/seq_len": tokens.sampled().lengths(),
        "ppo_actor/advantage": advantage,
        LOG_RATIO: log_ratio,
    }
    made = {name: Histogram.of(array) for name, array in values.items() if array is not None}
    return {name: histogram for name, histogram in made.items() if histogram is not None}


def distribution(values: np.ndarray) -> Mean:
    """Returns the mean of an array, with its smallest and largest value."""
    if not values.size:
        return Mean(0.0, 0)
    return Mean(float(values.sum(dtype=np.float64)), values.size, float(values.min()), float(values.max()))
