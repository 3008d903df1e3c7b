"""A hint is a config that was planned: the change that fits, the largest that fits, and no other."""

import dataclasses

import pytest

from rljax.config import checks
from rljax.planning.changes import changed, changes, largest_rows, longest_row
from rljax.planning.estimate import plan
from rljax.planning.text import Report
from tests.unit.planning.plans import plan_of, request_of


def test_a_config_that_does_not_fit_fits_with_the_change_that_says_so():
    before = plan_of("sglang:d4+fsdp:d1", shape="qwen3-8b")
    assert not before.fits
    found = changes(before)
    assert [change.saved for change in found] == sorted((change.saved for change in found), reverse=True)
    remedies = [change for change in found if change.plan.fits]
    assert {change.key for change in remedies} >= {"actor.lora.rank", "allocation_mode"}
    for change in remedies:  # the flag that is printed makes the same config
        key, _, value = str(change).removeprefix("--config.").partition("=")
        again = plan(dataclasses.replace(before.request, config=changed(before.request, key, change.value)))
        assert str(change.value) == value and again.fits
        peaks = {group.name: group.footprint.peak for group in again.groups}
        saved = max(group.footprint.peak - peaks[group.name] for group in before.groups)
        assert saved == pytest.approx(change.saved)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_shards_are_doubled_until_they_fit_or_the_devices_are_used_up(devices):
    before = plan_of("jax:d1", shape="qwen3-8b", topology=f"h100:{devices}")
    wider = {str(change.value): change.plan.fits for change in changes(before) if change.key == "allocation_mode"}
    tried = [2**i for i in range(1, devices.bit_length())]  # 2, 4, ... devices
    fitting = [n for n in tried if plan_of(f"jax:f{n}", shape="qwen3-8b", topology=f"h100:{devices}").fits]
    assert wider == {f"jax:f{n}": n in fitting for n in tried if not fitting or n <= fitting[0]}


@pytest.mark.parametrize("mode", ["jax:d1", "sglang:d1|fsdp:d1"])
def test_the_largest_micro_batch_fits_and_the_next_does_not(mode):
    before = plan_of(mode, **{"sglang.mem_fraction_static": 0.3, "jax.slots": 8})
    for key, step, found in (
        ("actor.mb_spec.rows_per_mb", 1, largest_rows(before)),
        ("actor.mb_spec.max_tokens_per_row", 128, longest_row(before)),
    ):
        at, beyond = (
            plan(dataclasses.replace(before.request, config=changed(before.request, key, count))).fits
            for count in (found, found + step)
        )
        assert at and not beyond, key


LONG = {"actor.mb_spec.max_tokens_per_row": 32768, "jax.context_length": 32768, "gconfig.max_new_tokens": 31000}
CRITIC = {  # of llama3.1-8b, on four H100s: rows come to about 2,700 tokens
    **{
        "actor.dtype": "float32",
        "actor.adv_estimator": "gae",
        "actor.reward_norm.mean_level": "none",
        "critic.optimizer.lr": 1e-3,
    },
    **{"gconfig.max_new_tokens": 4, "actor.gradient_checkpointing": "none"},
}
HINTED = {  # shape, topology, allocation_mode, keys
    "a row of 64": (
        *("llama3.1-8b", "h100:8", "sglang:d4+fsdp:f4"),
        CRITIC | {"actor.mb_spec.max_tokens_per_row": 64, "actor.mb_spec.rows_per_mb": 24},
    ),
    "no row is shorter": ("smollm2-135m", "h100:1", "jax:d1", LONG),
    "a large cache": ("qwen3-0.6b", "h100:1", "jax:d1", LONG),
    "many slots": ("qwen3-8b", "v5p:2x2x2", "jax:f8", LONG | {"jax.slots": 512}),
    "long prompts": (
        "qwen3-0.6b",
        "h100:2",
        "jax:d1+fsdp:d1",
        {"train_dataset.max_length": 1500, "actor.mb_spec.rows_per_mb": 99},
    ),
    "rows in several devices": ("llama3.1-8b", "v6e:4x4", "jax:f8+jax:f8", {}),
}


@pytest.mark.parametrize("case", HINTED)
def test_each_hint_is_one_that_a_run_takes_and_says_what_becomes_of_it(case):
    shape, topology, mode, keys = HINTED[case]
    request = request_of(mode, shape=shape, topology=topology, prompt=None, completion=None, **keys)
    report = Report.of(plan(request))
    rows = request.config.actor.mb_spec
    hints = [(change.key, change.value, change.plan.fits) for change in report.changes]
    hints += [("allocation_mode", str(report.balanced.allocation), True)] if report.balanced else []
    for key, found, own in (
        ("actor.mb_spec.rows_per_mb", report.rows, rows.rows_per_mb),
        ("actor.mb_spec.max_tokens_per_row", report.tokens, rows.max_tokens_per_row),
    ):
        hints += [] if found is None else [(key, found, True)]
        assert not report.plan.fits or found >= own
    for key, value, fits in hints:
        config = changed(request, key, value)
        checks.check(config)
        again = plan(dataclasses.replace(request, config=config))
        assert again.fits == fits, key
    assert report.plan.fits or any(fits for *_, fits in hints)


@pytest.mark.parametrize(("rows", "own"), [(24, 64), (12, 130), (43, 64)])
def test_the_longest_row_is_a_multiple_if_one_fits_and_no_shorter_than_a_row_that_fits(rows, own):
    keys = CRITIC | {"actor.mb_spec.rows_per_mb": rows, "actor.mb_spec.max_tokens_per_row": own}
    before = plan_of("sglang:d4+fsdp:f4", shape="llama3.1-8b", prompt=16, completion=4, **keys)
    found = longest_row(before)

    def fits(tokens):
        config = changed(before.request, "actor.mb_spec.max_tokens_per_row", tokens)
        return plan(dataclasses.replace(before.request, config=config)).fits

    assert fits(found) and not fits(found + (128 if found >= 128 else 1))
    assert found >= own or not before.fits


@pytest.mark.parametrize(
    ("key", "case"), [("jax.cache_tokens", "a large cache"), ("jax.slots", "a large cache"), ("jax.cache_tokens", "many slots")]
)
def test_a_number_is_halved_until_it_fits_and_no_further(key, case):
    shape, topology, mode, keys = HINTED[case]
    before = plan_of(mode, shape=shape, topology=topology, **keys)
    (change,) = (each for each in changes(before) if each.key == key)
    twice = changed(before.request, key, 2 * change.value)
    assert change.plan.fits and not plan(dataclasses.replace(before.request, config=twice)).fits
