"""The certificate of both learners and the JAX sampler, and that faults planted in the engines' own
programs, or in their optimizers, fail it.
"""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the certificate needs the extra [torch]")

from rljax.backends.jax import objective as jax_objective
from rljax.backends.torch import lora as torch_lora
from rljax.backends.torch import objective as torch_objective
from rljax.backends.torch import optim
from rljax.config import io as config_io
from rljax.engines.common.learner import PhasedLearner
from rljax.engines.cuda.learning import critic as torch_critic
from rljax.engines.cuda.learning import learner as torch_learner
from rljax.engines.jax.learning import functions as jax_functions
from rljax.errors import UserError
from rljax.experiments import main, parity
from rljax.experiments.certificate import engines, jax_optimizer, torch_optimizer
from rljax.experiments.certificate.bounds import FACTOR, of_float32, of_rounding
from rljax.experiments.certificate.case import make_case, with_policies_near
from rljax.experiments.certificate.oracle import Oracle
from rljax.experiments.certificate.report import Report, against_oracle, failed, of_optimizers
from rljax.hf import model_directory
from rljax.testing.models import config_of, make_model

PLAIN = {
    "gconfig.temperature": 0.7,
    "gconfig.n_samples": 2,
    "actor.mb_spec.max_tokens_per_row": 64,
    "actor.gradient_checkpointing": "none",
    "actor.optimizer.weight_decay": 0.01,
}
CRITIC = {"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1, "actor.kl_placement": "loss", "critic.eps_clip_value": 0.5}
LORA = {"actor.lora.rank": 4, "actor.lora.alpha": 12.0, "actor.lora.target_modules": ["q_proj", "v_proj", "down_proj"]}


def config_for(**overrides):
    return config_io.resolve(config_of(**{"actor.path": "model", **PLAIN, **overrides}))


def case_for(model_dir, dtype="float32", **overrides):
    """Returns a case, its right results and their bounds."""
    case = make_case(config_for(**overrides), model_dir, dtype, sequences=4, length=24)
    oracle = Oracle(case)
    case = with_policies_near(case, oracle.logp())
    right = oracle.run(case)
    if dtype == "float32":
        return case, right, of_float32(right)
    return case, right, of_rounding(case, right, oracle.in_dtype_of_case().run(case))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.2)


@pytest.fixture(scope="module")
def plain(model_dir):
    return case_for(model_dir)


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def plain_in(request, plain, model_dir):
    return plain if request.param == "float32" else case_for(model_dir, request.param)


@pytest.fixture(scope="module")
def with_critic(model_dir):
    return case_for(model_dir, **CRITIC)


@pytest.fixture(scope="module")
def with_adapters(model_dir):
    return case_for(model_dir, **LORA)


def failures(engine, case_right_bounds):
    case, right, bounds = case_right_bounds
    checks = against_oracle(engine, bounds, engines.run(engine, case), right)
    return {name.partition(": ")[2] for name in failed(checks)}


@pytest.mark.parametrize(
    ("architecture", "overrides", "dtype"),
    [
        ("qwen3", {}, "float32"),
        *(
            pytest.param(architecture, overrides, dtype, marks=pytest.mark.slow)
            for architecture, overrides, dtypes in (
                ("qwen3", {}, ("bfloat16",)),
                ("gemma3", CRITIC, ("float32", "bfloat16")),
                ("qwen2", {**LORA, **CRITIC}, ("float32", "bfloat16")),
                ("llama", {"actor.importance_sampling_level": "sequence"}, ("float32",)),
                ("qwen3", {"actor.loss": "sft"}, ("float32",)),
            )
            for dtype in dtypes
        ),
    ],
    ids=str,
)
def test_both_learners_and_the_sampler_agree_with_the_oracle(architecture, overrides, dtype, tmp_path):
    model = make_model(tmp_path / "model", architecture=architecture, initializer_range=0.1)
    report = parity.certify(config_for(**overrides), model, tmp_path, dtype, sequences=4, length=24)
    assert report.holds, "\n".join(report.lines())
    assert report.lines()[-1] == "verdict: parity"
    assert report.case.batch.segment_ids.max() > 1  # rows are packed
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["verdict"], written["dtype"]) == ("parity", dtype)
    names = {check["name"] for check in written["checks"]}
    assert {"jax: sampler's log-prob, max abs, nats", "fsdp: log-prob, max abs, nats"} <= names
    if "actor.kl_ctl" in overrides:
        assert {"jax: critic's value, max abs", "fsdp: reference's log-prob, max abs, nats"} <= names
    trained = torch_optimizer.two_steps(report.case)
    assert {f"both: optimizer alone on {name}" for name in trained} <= names


# Faults in the programs of a learner. Each is one that two backends could share.


def at_another_temperature(function):
    return lambda *args, temperature, **options: function(*args, temperature=1.0, **options)


def flipped(function):
    def planted(*args, **options):
        surrogate = function(*args, **options)
        return surrogate._replace(sum=-surrogate.sum)

    return planted


def plant(monkeypatch, module, name, change):
    monkeypatch.setattr(module, name, change(getattr(module, name)))


def test_a_wrong_temperature_in_both_learners_fails_both(plain, monkeypatch):
    for module in (jax_functions, torch_learner):
        plant(monkeypatch, module, "target_objective", at_another_temperature)
    for engine in parity.LEARNERS:
        assert {"loss, relative", "gradient of", "entropy, mean, nats"} <= failures(engine, plain)


def test_a_sign_flipped_in_both_backends_fails_both(plain_in, monkeypatch):
    for module in (jax_objective, torch_objective):
        plant(monkeypatch, module, "_surrogate", flipped)
    for engine in parity.LEARNERS:
        assert failures(engine, plain_in) == {"loss, relative", "gradient of"}


def test_no_fault_fails_none(plain, with_critic, with_adapters):
    for case in (plain, with_critic, with_adapters):
        assert failures("fsdp", case) == set()


def test_scoring_at_another_temperature_fails(plain_in, monkeypatch):
    plant(monkeypatch, torch_learner, "target_logprobs", at_another_temperature)
    assert failures("fsdp", plain_in) == {"log-prob, max abs, nats"}


def test_attention_across_the_segments_of_a_row_fails(plain_in, monkeypatch):
    def one_segment(function):
        return lambda batch, *args: function(batch.replace(segment_ids=np.minimum(batch.segment_ids, 1)), *args)

    plant(monkeypatch, torch_learner, "micro_batches", one_segment)
    seen = failures("fsdp", plain_in)
    assert "log-prob, max abs, nats" in seen
    assert "gradient of" in seen or plain_in[0].config.actor.dtype == "bfloat16"  # where a few percent are rounding


def test_the_reference_scored_with_the_current_policy_fails(with_critic, monkeypatch):
    monkeypatch.setattr(PhasedLearner, "score_reference", lambda self, batch: self.score(batch))
    assert failures("fsdp", with_critic) == {"reference's log-prob, max abs, nats"}


def test_a_critic_that_is_not_clipped_fails(with_critic, monkeypatch):
    plant(monkeypatch, torch_critic, "value_objective", lambda f: lambda *args, clip: f(*args, clip=None))
    assert {"critic's loss, relative", "critic's gradient of"} <= failures("fsdp", with_critic)


def test_adapters_at_another_scale_fail(with_adapters, monkeypatch):
    plant(monkeypatch, torch_lora, "adder", lambda f: lambda lora: f(dataclasses.replace(lora, alpha=2 * lora.alpha)))
    assert {"log-prob, max abs, nats", "gradient of"} <= failures("fsdp", with_adapters)


def test_a_gradient_halved_after_the_backward_pass_fails(plain_in, monkeypatch):
    plant(
        monkeypatch,
        torch_learner.Policy,
        "trained_parameters",
        lambda f: (
            lambda self: [
                dataclasses.replace(p, gradient=lambda p=p: None if p.gradient() is None else p.gradient() / 2) for p in f(self)
            ]
        ),
    )
    assert failures("fsdp", plain_in) == {"gradient of", "gradient norm, relative"}


# Optimizers


@pytest.fixture(scope="module")
def our_steps(plain):
    return jax_optimizer.two_steps(plain[0])


@pytest.mark.parametrize(
    "changes", [{"eps": 1e-7}, {"beta1": 0.91}, {"beta2": 0.951}, {"weight_decay": 0.011}, {"gradient_clipping": 1e-7}], ids=str
)
def test_another_optimizer_is_no_parity(plain, our_steps, changes):
    case = plain[0]
    assert not failed(of_optimizers(our_steps, torch_optimizer.two_steps(case)))
    other = dataclasses.replace(case, optimizer=dataclasses.replace(case.optimizer, **changes))
    assert failed(of_optimizers(our_steps, torch_optimizer.two_steps(other)))


def test_decay_of_norms_is_no_parity(plain, our_steps, monkeypatch):
    monkeypatch.setattr(optim, "decays", lambda name: True)
    checks = of_optimizers(our_steps, torch_optimizer.two_steps(plain[0]))
    odd = {check.tensor for check in checks if not check.holds}
    assert odd and all("norm" in name for name in odd)


def test_bounds_of_rounding_hold_what_is_as_wrong_and_a_little_more(plain):
    """Errors of FACTOR times those of the rounded results are the most that is allowed."""
    case, right, _ = plain
    random = np.random.default_rng(0)

    def wrong_by(factor):
        logp = right.logp + factor * 0.01 * random.choice([-1, 1], right.logp.shape)
        off = {name: (1 + factor * 0.02) * g for name, g in right.policy.gradients.items()}
        return dataclasses.replace(right, logp=logp, policy=dataclasses.replace(right.policy, gradients=off))

    bounds = of_rounding(case, right, wrong_by(1))
    assert bounds.logp == pytest.approx(0.01 * FACTOR)
    for factor, fails in ((0.98, set()), (1.02, {"fsdp: log-prob, max abs, nats", "fsdp: gradient of"})):
        checks = against_oracle("fsdp", bounds, wrong_by(factor * FACTOR), right)
        assert failed(checks) == fails
    slope = right.policy.slope  # of a mean over the tokens the norm of their error is the root of their number times smaller
    assert bounds.policy.loss * abs(right.policy.loss) == pytest.approx(FACTOR * 0.01 * slope * np.sqrt(len(right.logp)))


def test_not_a_number_is_no_parity(plain):
    case, right, bounds = plain
    result = dataclasses.replace(right, policy=dataclasses.replace(right.policy, loss=float("nan")))
    checks = against_oracle("jax", bounds, result, right)
    report = Report(case, tuple(checks))
    assert failed(checks) == {"jax: loss, relative"} and report.verdict == "NO PARITY"


def test_a_report_that_could_not_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    old = tmp_path / "old.json"
    old.write_text("{}")
    main.check_writable(old)
    main.check_writable(tmp_path / "new.json")
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "{}"
    monkeypatch.setattr(parity, "JSON", SimpleNamespace(value=str(tmp_path / "none" / "report.json")))
    monkeypatch.setattr(parity.main, "config_from_flags", lambda: config_io.load("configs/quickstart.py", []))
    monkeypatch.setattr(model_directory, "prepare_model_directory", lambda *args, **options: pytest.fail("the work was begun"))
    with pytest.raises(UserError, match=r"--json: cannot write .*report\.json"):
        parity.parity()
