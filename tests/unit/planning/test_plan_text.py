"""Words of a plan: as text, as JSON, and in a run's directory beside what was measured."""

import json
import math

import pytest

from rljax.config import io
from rljax.engine import find_plugin
from rljax.hf.companion_files import write_companions
from rljax.metrics.mean import Mean
from rljax.planning.run import estimate_of
from rljax.planning.text import Report
from rljax.sinks.planned import PlanSink
from rljax.sinks.run_directory import RunDirectory
from tests.unit.planning.plans import plan_of, request_of


def test_json_says_what_the_text_says_and_is_json():
    made = plan_of("sglang:d4+fsdp:d1", shape="qwen3-8b")
    report = Report.of(made)
    found = json.loads(json.dumps(report.json()))
    assert found["fits"] is False and "verdict: does not fit on h100:8" in str(report)
    for group in found["groups"]:
        assert math.isclose(sum(group["components"].values()), group["peak"])
        assert group["peak"] == pytest.approx(max(group["moments"].values()))
    first = report.changes[0]
    assert found["changes"][0]["key"] == first.key and str(first) in str(report)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("actor.dtype", "float32", "float32;"),
        ("actor.mb_spec.max_tokens_per_row", 1792, "x 1792 tokens"),
        ("actor.mb_spec.rows_per_mb", 3, "of 3 x"),
        ("gconfig.max_new_tokens", 333, "up to 333 tokens"),
        ("gconfig.n_samples", 7, ", 7 completions"),
        ("train_dataset.batch_size", 17, "of 17 prompts"),
    ],
)
def test_a_plan_begins_with_the_sizes_that_it_is_of(key, value, word):
    with_it, without = (str(Report(plan_of("jax:d1", **keys), [], None, None, None)) for keys in ({key: value}, {}))
    assert word in with_it.splitlines()[1] and word not in without.splitlines()[1]


def test_a_run_on_devices_of_unknown_size_has_its_bytes_and_no_verdict_on_them(tmp_path):
    request = request_of("jax:d1+fsdp:d1")
    write_companions(tmp_path, request.spec, "bfloat16", None)
    found = estimate_of(request.config, tmp_path, [], 2, find_plugin)
    known = estimate_of(request.config, tmp_path, ["NVIDIA H200", "NVIDIA H200"], 2, find_plugin)
    assert found["topology"] == "cpu:2" and found["rates"] is None and known["rates"] is not None
    for ours, theirs in zip(found["groups"], known["groups"], strict=True):
        assert ours["usable"] is None and theirs["usable"] > 100e9 and ours["peak"] > 0
    assert json.dumps(found, allow_nan=False)
    assert estimate_of(io.load("base", [("allocation_mode", "fake:d1")]), tmp_path, [], 1, find_plugin) is None


def test_what_was_measured_is_beside_the_estimate(tmp_path):
    run = RunDirectory(tmp_path)
    sink = PlanSink(run, {"topology": "cpu:1"})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"estimated": {"topology": "cpu:1"}, "measured": {}}
    steps = [(10, 1.0, 1), (30, 7.0, 2), (20, 4.0, 6), (20, 5.0, 4)]  # the first one compiles
    for step, (peak, tokens, seconds) in enumerate(steps):
        sink.write(
            step,
            {
                "memory/learner_peak_bytes": Mean(peak, 1),
                "timeperf/learner_tokens_per_s": Mean(tokens, seconds),
                "timeperf/wall": Mean(step, 1),
            },
        )
        sink.write(step, {"rollout/reward": Mean(1, 1), "timeperf/wall": Mean(9, 1)})
    sink.close()
    measured = json.loads((tmp_path / "plan.json").read_text())["measured"]
    assert measured == {"memory/learner_peak_bytes": 30, "timeperf/learner_tokens_per_s": 16 / 12, "timeperf/wall": 2}
    run.close()
