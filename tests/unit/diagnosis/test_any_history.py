"""Rules judge whatever a run may have recorded: gaps, constants, values of any size, few steps."""

import warnings

import numpy as np
import pytest

from rljax.diagnosis import RULES, History, Rule, diagnose
from tests.unit.diagnosis import made

CONFIGS = (
    None,
    made.config(),
    made.config(actor__adv_estimator="gae"),
    made.config(gconfig__n_samples=1),
    made.config(actor__ppo_n_minibatches=1),
)


def distorted(seed: int) -> History:
    """A history of which each metric is left as it was, or left out, or distorted."""
    random = np.random.default_rng(seed)
    steps = int(random.integers(1, 60))
    columns = {}
    for name, values in made.healthy(steps=steps).items():
        forms = (
            values,
            np.zeros(steps),
            -values,
            values * 10.0 ** random.integers(-300, 300),
            np.where(random.random(steps) < 0.5, np.nan, values),
            random.standard_normal(steps) * 10.0 ** random.integers(-5, 5),
        )
        if (form := random.integers(len(forms) + 1)) < len(forms):
            columns[name] = forms[form]
    config = CONFIGS[random.integers(len(CONFIGS))]
    return made.history(columns or {"rollout/reward/avg": np.zeros(steps)}, config=config)


@pytest.mark.parametrize("seed", range(40))
def test_no_rule_raises_or_speaks_of_nan(seed):
    history = distorted(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in RULES:
            if rule.is_about(history) and not rule.missing(history):
                finding = rule.apply(history)
                assert finding is None or not any("nan" in line for line in finding.evidence), rule.id


def test_a_rule_that_raises_is_unjudged_and_the_others_judge():
    raises = Rule("policy.raises", "It raises.", lambda history: 1 / 0)
    diagnosis = diagnose(made.history(), [raises, *RULES])
    assert "ZeroDivisionError" in diagnosis.unjudged["policy.raises"] and len(diagnosis.unjudged) == 1
