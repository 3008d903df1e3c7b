"""A shadow agrees with a sound learner, speaks where one is not, and never holds up the run."""

import shutil
import time

import numpy as np
import pytest

from rljax.config.allocation import Pool
from rljax.engine.plugins import find_plugin
from rljax.engine.rank import ProcessRank
from rljax.engines.common.learner import PhasedLearner
from rljax.engines.fake import model as fake_model
from rljax.engines.fake.learner import FakeLearner
from rljax.errors import UserError
from rljax.metrics.guardrails import Guardrails
from rljax.metrics.mean import Mean
from rljax.shadow import process, shadowed
from rljax.shadow.differences import FACTOR, FLOAT32, Computed, compare, of_rounding
from rljax.shadow.learner import MOST_DROPPED, ShadowedLearner
from rljax.shadow.process import Answer
from rljax.testing.harness import make_config
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack
from rljax.testing.models import VOCABULARY, make_model

UPDATE = "ppo_actor/update"
BFLOAT16_EPS = 2.0**-7
WAIT = 300.0  # seconds for a process that imports a framework and compiles


def batch_of():
    items = episodes(5)
    return pack(items, first_fit(items, 64), 64)


def computed(batch, *, logp=0.0, loss=0.5, grad_norm=2.0):
    return Computed(np.where(batch.loss_mask, logp, np.nan), loss, grad_norm)


def excess(batch, dtype, ours, theirs, right=None):
    return compare(batch, dtype, ours, theirs, right)["parity/excess"].value


@pytest.mark.parametrize("error", [0.0, 0.001, 0.05, 1.0])  # of log-probs, and of the norm, by rounding
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_difference_is_measured_in_its_bound(dtype, error):
    batch, right = batch_of(), computed(batch_of())
    scale = float(np.abs(batch.loss_weight * batch.advantage).sum())
    rounded, exact, bounds = right, None, FLOAT32
    if dtype == "bfloat16":
        rounded, exact = computed(batch, logp=error, grad_norm=2.0 * (1 - error)), right
        bounds = of_rounding(batch, dtype, right, rounded)
        assert (bounds.logp, bounds.gradient) == pytest.approx([FACTOR * max(error, BFLOAT16_EPS)] * 2)
        assert excess(batch, dtype, rounded, rounded, exact) <= 1 / FACTOR
    assert excess(batch, dtype, right, rounded, exact) == 0
    for changed in (
        {"logp": 3 * bounds.logp},
        {"loss": 0.5 + 3 * bounds.loss * scale},
        {"grad_norm": 2.0 * (1 + 3 * bounds.gradient)},
    ):
        assert excess(batch, dtype, computed(batch, **changed), rounded, exact) == pytest.approx(3)


@pytest.mark.parametrize("supervised", [False, True])
def test_a_loss_of_log_probs_that_rounding_moved_is_within_its_bound(supervised):
    """Whatever the errors of the log-probs are, and though the rounded loss is right by chance."""
    batch, rng = batch_of(), np.random.default_rng(0)
    if supervised:
        batch = batch.replace(advantage=np.zeros_like(batch.advantage))
    slopes = batch.loss_weight * (1 if supervised else batch.advantage)
    right = computed(batch, loss=0.3)
    for _ in range(100):
        errors = np.where(batch.loss_mask, 0.1 * rng.standard_normal(slopes.shape), 0.0)
        rounded = Computed(right.logp + errors, right.loss, right.grad_norm)
        moved = Computed(right.logp, right.loss + float((slopes * errors).sum()), right.grad_norm)
        assert excess(batch, "bfloat16", moved, rounded, right) <= 1 / FACTOR


def test_what_bfloat16_cannot_hold_is_not_asked_of_it():
    batch = batch_of()
    lost = computed(batch, loss=np.nan, grad_norm=np.nan)
    assert excess(batch, "bfloat16", lost, lost, computed(batch)) == np.inf  # but a loss that ours alone lost is a fault
    assert excess(batch, "bfloat16", computed(batch), computed(batch, grad_norm=np.nan), computed(batch)) == 0


def test_what_is_not_finite_on_one_side_alone_is_beyond_every_bound():
    batch = batch_of()
    skipped = computed(batch, loss=np.nan, grad_norm=np.nan)
    assert compare(batch, "float32", skipped, skipped)["parity/excess"].value == 0
    for pair in ((skipped, computed(batch)), (computed(batch), skipped), (computed(batch, logp=np.nan), computed(batch))):
        assert compare(batch, "float32", *pair)["parity/excess"].value == np.inf


def test_a_supervised_loss_is_compared_on_its_own_scale():
    batch = batch_of()
    batch = batch.replace(advantage=np.zeros_like(batch.advantage))
    off = computed(batch, loss=4.0 * (1 + 3 * FLOAT32.loss))
    assert compare(batch, "float32", off, computed(batch, loss=4.0))["parity/excess"].value == pytest.approx(3)


class Quick:
    """A shadow's process that answers at once, with a loss of 1e9."""

    busy = False

    def __init__(self, place, batch):
        self.place, self.given = place, []
        self._answer = Answer(Computed(np.zeros(batch.token_ids.shape, np.float32), 1e9, 0.0), None)

    def give(self, batch, *, supervised):
        self.given.append(supervised)

    def take(self):
        shutil.rmtree(self.place)
        return self._answer


@pytest.mark.parametrize(("loss", "given"), [("ppo", [True, True, False, False]), ("sft", [True, True])])
def test_the_first_step_of_every_second_batch_is_handed_over_in_each_phase(loss, given, tmp_path):
    config = make_config({"actor.loss": loss, "actor.ppo_n_minibatches": 2, "parity.shadow_every": 2})
    fake_model.make_model(tmp_path / "model", VOCABULARY)
    batch = batch_of()
    shadow = Quick(tmp_path / "job", batch)
    learner = ShadowedLearner(config, FakeLearner(config, tmp_path / "model"), shadow)
    supervised = [learner.update_supervised(batch) for _ in range(4)]
    updates = [learner.update(batch) for _ in range(8)] if loss == "ppo" else []
    assert shadow.given == given
    steps = [*supervised, *updates]
    assert [i for i, means in enumerate(steps) if "timeperf/shadow" in means] == [0, 2, 4, 8][: len(given)]
    assert [i for i, means in enumerate(steps) if "parity/excess" in means] == [1, 3, 5, 9][: len(given)]  # at the next one


class Silent(Quick):
    """A shadow's process that answers when it is told to."""

    log, answers = "log.txt", False

    @property
    def busy(self):
        return self.place.exists()

    def take(self):
        return super().take() if self.answers else None

    def close(self):
        pass


def test_a_shadow_that_does_not_answer_is_told_of_once_a_wait_and_the_end_counts(tmp_path, caplog):
    caplog.set_level("INFO")
    config = make_config({"parity.shadow_every": 1})
    fake_model.make_model(tmp_path / "model", VOCABULARY)
    batch = batch_of()
    shadow = Silent(tmp_path / "job", batch)
    learner = ShadowedLearner(config, FakeLearner(config, tmp_path / "model"), shadow)
    said = lambda: [r.levelname for r in caplog.records if "has not answered" in r.getMessage()]  # noqa: E731
    for _ in range(MOST_DROPPED):  # the first is handed over
        learner.update(batch)
    assert not said()
    for _ in range(2 * MOST_DROPPED):
        learner.update(batch)
    assert said() == ["WARNING"]
    shadow.answers = True
    learner.update(batch)
    learner.close()
    assert caplog.messages[-1] == f"parity: the shadow compared 1 of {3 * MOST_DROPPED + 1} batches that came due"


def test_a_shadow_has_no_rank_and_leaves_room_on_shared_devices(monkeypatch):
    rank = ProcessRank(rank=1, size=2, launch="x", coordinator="y").variables() | {"TORCHELASTIC_RUN_ID": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    for device in ("cpu", "shared"):
        assert not rank.keys() & process.environment(device).keys()
    assert process.environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert process.environment("shared")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # the user's own wish
    assert process.environment("shared")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_an_excess_is_a_breach():
    guardrails = Guardrails(config_of().guard)
    assert not guardrails.check(1, {"parity/excess": Mean(0.9, 1)})
    assert not guardrails.check(2, {"parity/excess": Mean(1.1, 1)})
    assert not guardrails.check(3, {})  # a step without an answer is none within the bound
    assert not guardrails.check(4, {"parity/excess": Mean(1.1, 1)})
    (breach,) = guardrails.check(5, {"parity/excess": Mean(1.1, 1)})
    assert breach.guard == "max_parity_excess" and "rljax parity" in breach.remedy
    (breach,) = Guardrails(config_of().guard).check(1, {"parity/excess": Mean(np.inf, 1)})


def test_another_learner_is_needed(tmp_path):
    learner = object()
    assert shadowed(config_of(), learner, Pool("jax"), tmp_path, tmp_path) is learner
    for engine in ("jax", "sglang"):
        config = config_of(**{"parity.shadow_every": 1, "parity.shadow_engine": engine})
        with pytest.raises(UserError, match=f"parity.shadow_engine: '{engine}' is no other learner"):
            shadowed(config, learner, Pool("jax"), tmp_path, tmp_path)


@pytest.mark.parametrize("engine", ["jax", "fsdp", "fake"])
def test_the_shadow_of_an_engine_is_another_one_that_learns_unless_the_config_names_one(engine):
    shadow = find_plugin(engine).shadow
    assert shadow != engine and find_plugin(shadow).learns


def make(engine, tmp_path, **overrides):
    pytest.importorskip("torch")
    config = config_of(
        **{
            "parity.shadow_every": 1,
            "gconfig.temperature": 0.7,
            "actor.ppo_n_minibatches": 2,
            "total_train_steps": 9,
            **overrides,
        }
    )
    model, pool = make_model(tmp_path / "model", initializer_range=0.2), Pool(engine)
    learner = find_plugin(engine).make_learner(config, pool, model)
    return shadowed(config, learner, pool, model, tmp_path)


def answered(learner):
    """Waits until the shadow has answered, or died."""
    until = time.monotonic() + WAIT
    while learner._shadow._answers.empty():
        assert time.monotonic() < until, learner._shadow.log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        ("fsdp", {}),
        ("jax", {}),
        ("jax", {"actor.dtype": "bfloat16"}),
        ("fsdp", {"actor.lora.rank": 4, "actor.lora.target_modules": ["q_proj"], "actor.adv_estimator": "gae"}),
    ],
    ids=str,
)
def test_a_sound_learner_agrees_with_its_shadow_and_a_fault_is_seen(engine, overrides, tmp_path, monkeypatch):
    learner, batch = make(engine, tmp_path, **overrides), batch_of()
    first = learner.update(batch)
    assert first["timeperf/shadow"].count == 1 and not any(name.startswith("parity/") for name in first)
    assert not learner.update(batch).keys() & {"timeperf/shadow", "parity/dropped"}  # another minibatch of the step
    assert learner.update(batch)["parity/dropped"].sum == 1 or not learner._shadow._answers.empty()
    learner.update(batch)
    answered(learner)
    sound = learner.update(batch)
    assert sound["parity/excess"].value < 1, sound
    learner.update(batch)
    answered(learner)
    assert learner.update(batch)["parity/excess"].value < 1  # from other weights, moments and steps
    if not overrides:  # supervised steps, with an optimizer of their own
        learner.update_supervised(batch)
        answered(learner)
        assert learner.update_supervised(batch)["parity/excess"].value < 1
    learner.update(batch)
    answered(learner)
    # A fault in the run's own process alone: the policy is trained on the opposite of what was rewarded, by half
    original = PhasedLearner.update
    halved = lambda self, batch: original(self, batch.replace(advantage=-0.5 * batch.advantage))  # noqa: E731
    monkeypatch.setattr(PhasedLearner, "update", halved)
    learner.update(batch)
    learner.update(batch)
    answered(learner)
    wrong = learner.update(batch)
    assert wrong["parity/excess"].value > 10
    assert wrong["parity/logp_error"].value < (FLOAT32.logp if learner._config.actor.dtype == "float32" else 0.5)
    child = learner._shadow._child
    learner.close()
    assert child.poll() is not None and not (tmp_path / "shadow" / "job").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_a_shadow_that_died(tmp_path, caplog):
    learner, batch = make("fsdp", tmp_path), batch_of()
    learner._shadow._child.kill()
    answered(learner)
    for _ in range(4):
        means = learner.update(batch)
        assert means[f"{UPDATE}/grad_norm"].count == 1
    assert learner._shadow is None and "the run goes on without a shadow" in caplog.text
    learner.close()
