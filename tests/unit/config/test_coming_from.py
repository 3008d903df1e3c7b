"""docs/coming-from.md: its functions give the objective of TRL and of verl, by numbers, and its keys exist.

The formulas are written down from their sources: TRL 1.16 (`trainer/grpo_trainer.py`) and verl 0.9
(`trainer/ppo/core_algos.py`).
"""

import re
from pathlib import Path

import numpy as np
import pytest

from rljax.config import io as config_io
from rljax.config.defaults import get_config
from rljax.config.learning_rate import make_schedule
from rljax.objective import oracle
from rljax.objective.advantages import normalized
from rljax.objective.aggregation import loss_weights
from rljax.objective.spec import Objective, TokenArrays

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
