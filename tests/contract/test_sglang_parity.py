"""The certificate with a real SGLang server: its log-probs against the oracle, and a fault planted in
its client."""

import dataclasses

import pytest

pytest.importorskip("torch", reason="the certificate needs the extra [torch]")

from rljax.config import io as config_io
from rljax.engines.http.client import HttpSampler
from rljax.experiments import parity
from rljax.experiments.certificate import engines
from rljax.experiments.certificate.oracle import Oracle
from rljax.experiments.certificate.report import of_sampler
from rljax.testing.models import config_of, make_model
from tests.shared import sglang_device, sglang_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LOGP = "sglang: sampler's log-prob, max abs, nats"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglangs_log_probs_are_the_oracles(dtype, tmp_path, monkeypatch):
    if sglang_device() == "cuda" and dtype == "float32":
        pytest.skip("SGLang's RMSNorm on GPUs has no float32")
    model = make_model(tmp_path / "model", architecture="qwen3", initializer_range=0.1)
    overrides = {"actor.path": str(model), "gconfig.temperature": 0.7, "actor.gradient_checkpointing": "none"}
    servers = sglang_flags()
    servers["sglang.extra_args"] = (
        *servers["sglang.extra_args"],
        "--max-total-tokens",
        "4096",
    )  # else most of the memory
    config = config_io.resolve(config_of(**overrides, **servers))
    report = parity.certify(config, model, tmp_path, dtype, sequences=4, length=24)
    (check,) = [check for check in report.checks if check.name == LOGP]
    assert report.holds and not report.left_out, "\n".join(report.lines())
    assert check.difference < check.bound

    async def untempered(self, request):
        return await generate(self, dataclasses.replace(request, params=dataclasses.replace(request.params, temperature=1.0)))

    generate = HttpSampler.generate
    monkeypatch.setattr(HttpSampler, "generate", untempered)
    sampled = engines.sample("sglang", report.case, tmp_path / "exported-fsdp")
    right = engines.scored(sampled, Oracle(report.case))
    assert not of_sampler("sglang", check.bound, sampled.logp, right).holds
