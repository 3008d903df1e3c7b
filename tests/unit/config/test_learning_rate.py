"""Learning rate of a run that goes on to another number of steps."""

import math

import pytest

from rljax.config.learning_rate import describe_change, make_schedule
from rljax.config.schema import OptimizerConfig


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 8, 1000])
def test_every_step_has_a_rate_above_0(kind, steps):
    rate = make_schedule(OptimizerConfig(lr=2e-4, lr_scheduler_type=kind), steps, "actor.optimizer")
    assert all(rate(step) > 0 for step in range(steps)) and rate(steps) == pytest.approx(0, abs=1e-12)


def test_a_cosine_that_goes_on_says_what_the_rate_becomes():
    config = OptimizerConfig(lr=2e-4, lr_scheduler_type="cosine")
    line = describe_change(config, "actor.optimizer", done=8, before=8, now=16)
    last, following = (1e-4 * (1 + math.cos(math.pi * share)) for share in (7 / 8, 8 / 16))
    assert f"with lr 0.0002 the last step's rate is {last:.4g} by the old end" in line and "step 16, not 8" in line
    assert f"the next one's {following:.4g} by the new" in line
    assert not describe_change(config, "actor.optimizer", done=8, before=8, now=8)
    assert not describe_change(config, "actor.optimizer", done=0, before=8, now=16)
    assert not describe_change(OptimizerConfig(lr=2e-4), "actor.optimizer", done=4, before=8, now=16)
