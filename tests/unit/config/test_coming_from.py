"""docs/coming-from.md: its functions give the objectives of TRL, verl and OpenRLHF, by numbers, and its keys exist.

The formulas are written down from their sources: TRL 1.16 (`trainer/grpo_trainer.py`), verl 0.9
(`trainer/ppo/core_algos.py`) and OpenRLHF 0.11.2.
"""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from rljax.config import checks as config_checks
from rljax.config import io as config_io
from rljax.config.defaults import get_config
from rljax.config.learning_rate import make_schedule
from rljax.configs import quickstart
from rljax.objective import losses, oracle
from rljax.objective.advantages import advantages_of, normalized
from rljax.objective.aggregation import loss_weights
from rljax.objective.spec import Objective, TokenArrays
from rljax.types import PROMPT_VERSION, Finish, Group, Trajectory

PAGE = Path(__file__).resolve().parents[3] / "docs" / "coming-from.md"
OLDER_OF_TRL = {"max_prompt_length", "warmup_ratio", "torch_dtype"}  # which people still have in their files
SHAPE, GROUP = (8, 6), 4


@pytest.fixture(scope="module")
def setters():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def config_of(setter):
    tree = get_config()
    setter(tree)
    return config_io.from_dict(tree.to_dict())


def batch():
    random = np.random.default_rng(0)
    logp, proximal, behavior = (-1 + random.normal(scale=0.35, size=SHAPE) for _ in range(3))
    mask = np.arange(SHAPE[1]) < random.integers(1, SHAPE[1] + 1, SHAPE[0])[:, None]
    return random.choice([0.0, 0.4, 1.0], SHAPE[0]), logp, proximal, behavior, mask


def grouped(rewards, eps):
    groups = rewards.reshape(-1, GROUP)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + eps)).ravel()


def clipped(logp, proximal, advantage, low, high):
    ratio = np.exp(logp - proximal)
    return np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high))


def trl_loss(rewards, logp, proximal, behavior, mask):
    """dapo: the sum over tokens over their number; a sequence whose weight is above 3 is masked."""
    weight = np.exp(np.where(mask, proximal - behavior, 0).sum(1, keepdims=True))
    weight = np.where(weight > 3.0, 0.0, weight)
    loss = weight * clipped(logp, proximal, grouped(rewards, 1e-4)[:, None], 0.2, 0.2)
    return np.where(mask, loss, 0).sum() / mask.sum()


def verl_loss(rewards, logp, proximal, behavior, mask):
    """vanilla: the dual clip at 3, and token-mean."""
    advantage = np.broadcast_to(grouped(rewards, 1e-6)[:, None], SHAPE)
    loss = clipped(logp, proximal, advantage, 0.2, 0.2)
    loss = np.where(advantage < 0, np.minimum(loss, -advantage * 3.0), loss)
    return np.where(mask, loss, 0).sum() / mask.sum()


def cispo_loss(rewards, logp, proximal, behavior, mask):
    """cispo: the ratio, clamped at epsilon_high=5 from above alone, is a weight without a gradient."""
    weight = np.exp(np.where(mask, proximal - behavior, 0).sum(1, keepdims=True))
    weight = np.where(weight > 3.0, 0.0, weight)
    ratio = np.minimum(np.exp(logp - proximal), 5.0)
    loss = -weight * ratio * grouped(rewards, 1e-4)[:, None] * logp
    return np.where(mask, loss, 0).sum() / mask.sum()


@pytest.mark.parametrize(("setter", "theirs"), [("as_trl", trl_loss), ("as_trl_cispo", cispo_loss), ("as_verl", verl_loss)])
def test_a_function_of_the_page_gives_their_loss(setters, setter, theirs):
    config = config_of(setters[setter])
    rewards, logp, proximal, behavior, mask = batch()
    logp[0] += 1.5  # beyond the dual clip
    logp[1] -= 3.0  # below any lower bound but 0
    score = normalized(rewards, np.arange(SHAPE[0]) // GROUP, config.actor.reward_norm)
    tokens = TokenArrays(
        loss_weight=np.stack(loss_weights(list(mask), config.actor.loss_aggregation)),
        mask=mask,
        advantage=np.broadcast_to(score[:, None], SHAPE),
        behavior_logp=behavior,
        segment_ids=np.ones(SHAPE, int),
        proximal_logp=proximal,
    )
    ours = oracle.policy_objective(logp, np.zeros(SHAPE), tokens, Objective.from_config(config)).loss
    np.testing.assert_allclose(ours, theirs(rewards, logp, proximal, behavior, mask), rtol=1e-6)


VERL_AGGREGATIONS = {  # agg_loss: loss and mask of a batch, and loss_scale_factor
    "token-mean": lambda loss, mask, factor: (loss * mask).sum() / mask.sum(),
    "seq-mean-token-mean": lambda loss, mask, factor: ((loss * mask).sum(1) / mask.sum(1)).mean(),
    "seq-mean-token-sum": lambda loss, mask, factor: (loss * mask).sum(1).mean(),
    "seq-mean-token-sum-norm": lambda loss, mask, factor: (loss * mask).sum(1).mean() / factor,
}


@pytest.mark.parametrize("mode", VERL_AGGREGATIONS)
def test_an_aggregation_of_the_page_gives_verls(mode):
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `actor.loss_agg_mode`")]
    assert mode in row.split(" | ")[0] and "`loss_aggregation_constant=1`" in row.split(" | ")[1]
    ours = mode.removesuffix("-norm")
    *_, mask = batch()
    loss, factor = np.random.default_rng(1).normal(size=SHAPE), 11
    constant = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": factor}.get(mode)
    weight = np.stack(loss_weights(list(mask), ours, constant))
    np.testing.assert_allclose((weight * loss).sum(), VERL_AGGREGATIONS[mode](loss, mask, factor), rtol=1e-6)


# OpenRLHF 0.11: models/loss.py, models/utils.py, trainer/ppo_utils/experience_maker.py

OPENRLHF = ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"]
WHITENED = ("gae", "reinforce", "reinforce_baseline")


def openrlhf_advantages(estimator, rewards, kl, values, mask):
    """The reward less its baseline at the last token, less 0.01 of the KL at each; summed up, or GAE; whitened."""
    groups = rewards.reshape(-1, GROUP)
    baseline = {
        "rloo": (groups.sum(1, keepdims=True) - groups) / (GROUP - 1),
        "flash_reinforce": groups.mean(),
        **dict.fromkeys(("gae", "reinforce"), 0.0),
    }.get(estimator, groups.mean(1, keepdims=True))
    shaped = (groups - baseline) / (groups.std(1, ddof=1, keepdims=True) + 1e-9 if estimator == "group_norm" else 1.0)
    token_rewards = np.where(mask, -0.01 * kl, 0.0)
    token_rewards[np.arange(len(mask)), mask.sum(1) - 1] += np.clip(shaped.ravel(), -10, 10)
    if estimator == "gae":
        following = np.pad(np.where(mask, values, 0.0), ((0, 0), (0, 1)))
        token_rewards = token_rewards + following[:, 1:] - following[:, :-1]  # deltas, with gamma and lambda 1
    advantage = np.cumsum(token_rewards[:, ::-1], axis=1)[:, ::-1]
    returns = advantage + np.where(mask, values, 0.0)
    if estimator in WHITENED:
        mean = advantage[mask].mean()
        advantage = (advantage - mean) / np.sqrt(max(((advantage[mask] - mean) ** 2).mean(), 1e-8))
    return np.where(mask, advantage, 0.0), np.where(mask, returns, 0.0)


def trajectory_of(reward, behavior, mask):
    """A prompt of one token, and what is sampled behind it."""
    length = int(mask.sum()) + 1
    sampled = np.arange(length) > 0
    logp = np.where(sampled, np.pad(behavior[: length - 1], (1, 0)), 0).astype(np.float32)
    versions = np.where(sampled, 0, PROMPT_VERSION).astype(np.int32)
    return Trajectory(np.arange(length, dtype=np.int32), sampled, logp, versions, float(reward), {}, Finish.STOP)


def in_rows(arrays):
    """Arrays of trajectories without their prompts, padded with 0."""
    return np.stack([np.pad(array[1:], (0, SHAPE[1] + 1 - len(array))) for array in arrays])


def in_groups(rewards, behavior, mask):
    trajectories = [trajectory_of(*parts) for parts in zip(rewards, behavior, mask, strict=True)]
    return [Group(f"0/{i}", tuple(trajectories[i : i + GROUP])) for i in range(0, len(trajectories), GROUP)]


def with_prompts(rows, mask):
    """Rows as arrays of trajectories, with a 0 for the prompt."""
    return [np.pad(row[:length], (1, 0)) for row, length in zip(rows, mask.sum(1), strict=True)]


@pytest.mark.parametrize("estimator", OPENRLHF)
def test_as_openrlhf_gives_its_advantages_and_its_loss(setters, estimator):
    """The KL of its reward is of recomputed log-probs there, and here of those that sampled, as the page says."""
    config = config_of(lambda tree: setters["as_openrlhf"](tree, estimator))
    rewards, logp, proximal, behavior, mask = batch()
    random, with_critic = np.random.default_rng(2), estimator == "gae"
    reference, values = behavior + random.normal(scale=0.5, size=SHAPE), random.normal(size=SHAPE)
    found = advantages_of(
        in_groups(rewards, behavior, mask),
        config,
        values=with_prompts(values, mask) if with_critic else None,
        reference_logp=with_prompts(reference, mask),
    )
    advantage, returns = openrlhf_advantages(estimator, rewards, behavior - reference, values, mask)
    np.testing.assert_allclose(in_rows(found.advantage), advantage, rtol=1e-5, atol=1e-6)
    if with_critic:
        np.testing.assert_allclose(in_rows(found.returns), returns, rtol=1e-5, atol=1e-6)
    tokens = tokens_of(config, mask, advantage, behavior, proximal)
    ours = oracle.policy_objective(logp, np.zeros(SHAPE), tokens, Objective.from_config(config)).loss
    theirs = clipped(logp, proximal, advantage, 0.2, 0.2)
    np.testing.assert_allclose(ours, np.where(mask, theirs, 0).sum() / mask.sum(), rtol=1e-6)


def test_reinforce_without_its_std_is_what_the_page_says(setters):
    def setter(tree):
        setters["as_openrlhf"](tree, "reinforce")
        tree.actor.adv_estimator, tree.actor.reward_norm.mean_level = "grpo", "none"
        tree.actor.adv_norm.std_level = "none"

    rewards, _, _, behavior, mask = batch()
    reference = behavior + np.random.default_rng(2).normal(scale=0.5, size=SHAPE)
    found = advantages_of(in_groups(rewards, behavior, mask), config_of(setter), reference_logp=with_prompts(reference, mask))
    _, sums = openrlhf_advantages("reinforce", rewards, behavior - reference, np.zeros(SHAPE), mask)  # without values
    expected = np.where(mask, sums - sums[mask].mean(), 0.0)
    np.testing.assert_allclose(in_rows(found.advantage), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", OPENRLHF)
def test_a_run_accepts_what_as_openrlhf_sets(setters, estimator):
    tree = quickstart.get_config()
    setters["as_openrlhf"](tree, estimator)
    config_checks.check(config_io.from_dict(tree.to_dict()))


def tokens_of(config, mask, advantage, behavior, proximal, reference=None):
    weight = np.stack(loss_weights(list(mask), config.actor.loss_aggregation))
    return TokenArrays(weight, mask, advantage, behavior, np.ones(SHAPE, int), proximal, reference)


def openrlhf_sequence_loss(logp, proximal, behavior, advantage, mask):
    """gspo: the ratio is the exponential of a sequence's mean log-ratio; the mean over sequences of their means."""
    counts = mask.sum(1, keepdims=True)
    ratio = np.exp(np.where(mask, logp - proximal, 0).sum(1, keepdims=True) / counts) * mask
    loss = np.maximum(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
    return (np.where(mask, loss, 0).sum(1) / counts[:, 0]).mean()


def openrlhf_corrected_loss(mode, logp, proximal, behavior, advantage, mask):
    """is_correction_level token, is_correction_threshold 1.5."""
    weight = np.exp(proximal - behavior)
    weight = np.minimum(weight, 1.5) if mode == "clip" else np.where(weight <= 1.5, weight, 0.0)
    return np.where(mask, weight * clipped(logp, proximal, advantage, 0.2, 0.2), 0).sum() / mask.sum()


def gspo(actor):
    actor.importance_sampling_level, actor.loss_aggregation = "sequence", "seq-mean-token-mean"


def corrected(mode):
    def change(actor):
        actor.use_decoupled_loss, actor.behav_imp_weight_mode, actor.behav_imp_weight_cap = True, mode, 1.5

    return change


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        (gspo, openrlhf_sequence_loss),
        (corrected("mask"), functools.partial(openrlhf_corrected_loss, "mask")),
        (corrected("clamp"), functools.partial(openrlhf_corrected_loss, "clip")),
    ],
    ids=["gspo", "mask", "clip"],
)
def test_openrlhfs_other_losses_are_those_that_the_page_names(setters, change, theirs):
    def setter(tree):
        setters["as_openrlhf"](tree, "rloo")
        change(tree.actor)

    config = config_of(setter)
    _, logp, proximal, behavior, mask = batch()
    assert (np.exp(proximal - behavior)[mask] > 1.5).any()
    advantage = np.broadcast_to(np.random.default_rng(3).normal(size=(len(mask), 1)), SHAPE)
    tokens = tokens_of(config, mask, advantage, behavior, proximal)
    ours = oracle.policy_objective(logp, np.zeros(SHAPE), tokens, Objective.from_config(config)).loss
    np.testing.assert_allclose(ours, theirs(logp, proximal, behavior, advantage, mask), rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_loss_has_openrlhfs_unbiased_gradient(setters, estimator):
    """Gradient of w (log-ratio)^2 / 2, w held, whatever the estimator: here by finite differences."""

    def setter(tree):
        setters["as_openrlhf"](tree, "rloo")
        tree.actor.kl_placement, tree.actor.kl_estimator, tree.actor.behav_imp_weight_cap = "loss", estimator, 10.0

    config = config_of(setter)
    _, logp, old, reference, mask = batch()
    logp[0, 0] = old[0, 0] + 3.0  # a weight above 10
    tokens = tokens_of(config, mask, np.zeros(SHAPE), old, old, reference)
    ours = oracle.policy_objective(logp, np.zeros(SHAPE), tokens, Objective.from_config(config)).d_logp
    weight, h = np.minimum(np.exp(logp - old), 10.0), 1e-5

    def surrogate(moved):  # of each token; the tokens are added up
        return 0.01 * np.where(mask, weight * (moved - reference) ** 2 / 2, 0) / mask.sum()

    np.testing.assert_allclose(ours, (surrogate(logp + h) - surrogate(logp - h)) / (2 * h), rtol=1e-6, atol=1e-10)


def test_the_value_loss_is_openrlhfs():
    """Half the larger squared error, of the value and of the one clipped at value_clip 0.5."""
    random, (*_, mask) = np.random.default_rng(4), batch()
    values, old, returns = random.normal(size=(3, *SHAPE))
    clipped_values = old + np.clip(values - old, -0.5, 0.5)
    theirs = 0.5 * np.maximum((clipped_values - returns) ** 2, (values - returns) ** 2)
    weight = np.stack(loss_weights(list(mask), "token-mean"))
    ours = losses.value_loss(values, old, returns, mask, weight, clip=0.5).sum
    np.testing.assert_allclose(ours, np.where(mask, theirs, 0).sum() / mask.sum(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_warm_up_begins_where_the_page_says(kind):
    """transformers' schedule, which TRL uses; verl's says the same of its first step."""
    pytest.importorskip("torch", reason="transformers' schedules need the extra [torch]")
    import torch
    import transformers

    config = get_config()
    config.actor.optimizer.warmup_steps_proportion, config.actor.optimizer.lr_scheduler_type = 0.4, kind
    config.actor.optimizer.lr = 1.0
    rate = make_schedule(config_io.from_dict(config.to_dict()).actor.optimizer, 10, "actor.optimizer")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = transformers.get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=10)
    assert (rate(0), theirs.get_last_lr()) == (1 / 4, [0.0])


def endings(leaf):
    """A dotted key, its sections, and what is left of each without the first of them."""
    parts = leaf.split(".")
    return {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}


def test_keys_of_ours_that_the_page_names_exist():
    """Keys in the second column of its tables: `section.key`, `section.{a,b}`, or a key without its section."""
    names = {part for leaf in config_io.leaves() for part in endings(leaf)}
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for row in rows:
        for name in re.findall(r"`([\w.{},]+)(?:=[^`]*)?`", row[1]):
            head, braces, inside = name.partition("{")
            for each in [head + part for part in inside.rstrip("}").split(",")] if braces else [name]:
                assert each in names or each == "t", each


def test_keys_of_trl_that_the_page_names_exist():
    trl = pytest.importorskip("trl", reason="the names of TRL's settings need the extra [trl]")
    table = PAGE.read_text().partition("## TRL\n")[2].partition("## verl")[0]
    firsts = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")][1:]
    settings = (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
    fields = {name for kind in settings for name in kind.__dataclass_fields__} | OLDER_OF_TRL
    for name in (name for cell in firsts for name in re.findall(r"`(\w+)`", cell)):
        assert name in fields or any(field.endswith(name) for field in fields), name
