"""A plan refuses what a run refuses, in the same words, and believes no figure that no run can have."""

import dataclasses
import json
import shlex

import pytest

from rljax import engine
from rljax.backends.jax.platforms import PLATFORMS
from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.experiments.plan_lengths import check_lengths
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import shape_of
from rljax.hf.splits import check_copied_heads
from rljax.hf.tensors import parameter_count
from rljax.launching.hosts import Hosts, shared_over_hosts
from rljax.launching.job import Where, job_of
from rljax.planning.changes import changes
from rljax.planning.estimate import Request, plan
from rljax.planning.load import Load
from rljax.planning.model_shape import shape_in
from rljax.planning.text import Report
from tests.unit.planning import plans


def config_of(mode, base="base", **keys):
    pairs = [(name, json.dumps(value) if isinstance(value, bool) else str(value)) for name, value in keys.items()]
    named = [] if base != "base" else [("actor.path", "none"), ("train_dataset.path", "none")]  # neither is read
    return io.load(base, [("allocation_mode", mode), *named, *pairs])


def plan_of(mode, shape="qwen3-8b", topology="h100:8", **keys):
    return plan(Request(config_of(mode, **keys), shape_of(shape), Topology.parse(topology), find_plugin, 256, 256))


LAG, LENDS = "rollout.max_head_offpolicyness", "sglang.release_memory"
REFUSED = {
    "a context without room": ("jax:d1", {"jax.context_length": 512}),
    "longer completions than the context": ("jax:d1", {"gconfig.max_new_tokens": 3000}),
    "longer prompts than the context": ("jax:d1", {"train_dataset.max_length": 3000}),
    "an asynchronous sampler that lends": ("sglang:d1|fsdp:d1", {LENDS: True, LAG: 2}),
    "the same of the JAX path": ("jax:d1", {"jax.release_memory": True, LAG: 1}),
    "a sampler elsewhere that lends": ("sglang:d1+fsdp:d1", {LENDS: True, LAG: 0}),
    "slots that shards don't share": ("jax:d2", {"jax.slots": 3}),
    "one program for two engines": ("jax:d1+fsdp:d1", {"jax.bitwise": True}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_run_s_check_refuses_a_plan_refuses_in_the_same_words(case):
    mode, keys = REFUSED[case]
    config = config_of(mode, **keys)
    with pytest.raises(UserError) as of_run:
        engine.check(config, engine.allocate(config))
    with pytest.raises(UserError) as of_plan:
        plan_of(mode, **keys)
    assert str(of_plan.value) == str(of_run.value)
    plan_of(mode)  # nothing else is the matter with it


@pytest.mark.parametrize(("mode", "key"), [("sglang:d1|fsdp:d1", LENDS), ("jax:d1", "jax.release_memory")])
@pytest.mark.parametrize("lag", [0, 2])
def test_lending_is_suggested_to_synchronous_runs_alone(mode, key, lag):
    before = plan_of(mode, **{"actor.lora.rank": 16, LAG: lag}, topology="h200:1")
    offered = [change for change in changes(before) if change.key == key]
    assert len(offered) == (lag == 0)
    for change in offered:
        (group,), (lent,) = before.groups, change.plan.groups
        assert lent.in_turn and change.saved == group.footprint.peak - lent.footprint.peak


def test_a_server_starts_if_its_share_holds_the_weights_and_a_request():
    made = plan_of("sglang:d4+fsdp:f8", shape="qwen3-32b", topology="h100:16")
    sampler, memory = made.sampler, made.request.topology.memory
    least = (sampler.weights + (256 + 512) * sampler.token) / memory  # the longest completion has 512
    for share, starts in ((1.001 * least, True), (0.999 * least, False), (least / 2, False)):
        found = plan_of("sglang:d4+fsdp:f8", shape="qwen3-32b", topology="h100:16", **{"sglang.mem_fraction_static": share})
        assert found.fits == starts and all(group.margin > 0 for group in found.groups)
        report = Report(found, (), None, None, None)
        assert ("does not start: sglang.mem_fraction_static" in str(report)) != starts
        assert [bool(group["problem"]) for group in report.json()["groups"]] == [not starts, False]


@pytest.mark.parametrize(("mode", "topology"), [("sglang:d4+fsdp:f8", "h100:16"), ("sglang:d4|fsdp:f4", "h200:4")])
@pytest.mark.parametrize("share", [0.1, 0.45, 0.95])
def test_the_share_that_is_suggested_is_the_last_one_with_which_the_config_fits(mode, topology, share):
    """The least with which a server starts, or the largest beside what else is on its devices."""

    def with_share(value):
        shape = "qwen3-32b" if "+" in mode else "qwen3-1.7b"
        return plan_of(mode, shape=shape, topology=topology, **{"sglang.mem_fraction_static": value})

    before, step = with_share(share), 0.01 if share > 0.5 else -0.01
    found = [change for change in changes(before) if change.key == "sglang.mem_fraction_static" and change.plan.fits]
    if before.fits:
        assert not any(group.problem for change in found for group in change.plan.groups)
        return
    (change,) = found
    assert with_share(change.value).fits and not with_share(round(change.value + step, 2)).fits
    assert (change.saved < 0) == bool(before.groups[0].problem)


def test_a_server_that_does_not_start_has_no_rate_and_no_micro_batch_is_sought_for_it():
    keys = {"topology": "h100:16", "shape": "qwen3-32b"}
    text, starts = (
        str(Report.of(plan_of("sglang:d4+fsdp:f8", **keys, **{"sglang.mem_fraction_static": share}))) for share in (0.5, 0.85)
    )
    assert "  no micro-batch makes it fit: the sampler does not start\n" in text and "largest that fits" not in text
    assert "  sampler: no rate, as it does not start\n" in text and "KV cache" not in text and "no split" not in text
    assert "no micro-batch" not in starts and "largest that fits: actor.mb_spec.rows_per_mb=" in starts


def test_no_micro_batch_helps_a_sampler_on_devices_of_its_own_that_does_not_fit():
    whole = plan_of("sglang:d1+fsdp:f4", topology="h100:8", **{"sglang.mem_fraction_static": 0.99})
    assert "  no micro-batch makes it fit: the sampler's devices are too full\n" in str(Report.of(whole))


def test_a_largest_that_is_the_last_one_tried_may_be_larger():
    text = str(Report(plan_of("fsdp:f8", **{"rollout.addr": "host:1"}), (), 1024, 128, None))
    assert "rows_per_mb=1024 or more, or .max_tokens_per_row=128\n" in text


def test_times_of_a_model_that_waits_for_launches_are_said_to_be_too_short():
    tiny, large = (str(Report.of(plan_of("jax:d1", shape=shape, topology="h200:1"))) for shape in ("tiny", "qwen3-8b"))
    assert "these times are too short" in tiny and "these times are too short" not in large


@pytest.mark.parametrize(("rows", "said"), [(1, "a micro-batch has 4 rows"), (4, ""), (5, "a micro-batch has 8 rows")])
def test_a_micro_batch_of_more_rows_than_the_config_says_is_told(rows, said):
    keys = {"rollout.addr": "host:1", "actor.mb_spec.rows_per_mb": rows}
    text = str(Report.of(plan_of("fsdp:c4", shape="qwen3-0.6b", **keys)))
    assert said in text and ("a micro-batch has" in text) == bool(said)


@pytest.mark.parametrize(("devices", "words"), [(1, "1 device of"), (2, "2 devices of")])
def test_one_device_is_not_several(devices, words):
    text = str(Report.of(plan_of(f"jax:f{devices}", shape="qwen3-0.6b", topology=f"h100:{devices}")))
    assert words in text and f"sampler and learner, {words.removesuffix(' of')}: " in text
    assert " 1 devices" not in text and " 1 steps" not in text


def test_a_sampler_on_the_host_takes_no_gpu():
    """Plans it as a sampler elsewhere, whose learner has the same devices."""
    mode, host = "sglang:d4+fsdp:f4", {"sglang.device": "cpu"}
    with pytest.raises(UserError, match="needs 8 devices, and h100:4 has 4"):
        plan_of(mode, topology="h100:4")
    on_host, elsewhere = (plan_of(mode, topology="h100:4", **keys) for keys in (host, {"rollout.addr": "host:1"}))
    assert on_host.groups == elsewhere.groups and on_host.allocation == elsewhere.allocation and on_host.sampler is None
    assert "the sampler is on the host's CPU (sglang.device), which is not planned for" in str(Report.of(on_host))
    assert "the sampler is at rollout.addr, which is not planned for" in str(Report.of(elsewhere))


def test_a_flag_that_is_suggested_is_one_word_of_a_shell():
    for change in changes(plan_of("sglang:d1|fsdp:d1", topology="h100:8")):
        lexer = shlex.shlex(str(change), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        (word,) = lexer
        assert word == f"--config.{change.key}={change.value}"


@pytest.mark.parametrize("share", [0.85, 0.8])
def test_no_share_is_suggested_with_which_a_server_does_not_start(share):
    before = plan_of("sglang:d4+fsdp:f8", shape="qwen3-32b", topology="h100:16", **{"sglang.mem_fraction_static": share})
    assert not [change for change in changes(before) if any(group.problem for group in change.plan.groups)]
    roomy = plan_of("sglang:d4+fsdp:f4", **{"sglang.mem_fraction_static": share})
    assert "sglang.mem_fraction_static" in {change.key for change in changes(roomy)}


def test_a_server_in_float32_has_weights_and_cache_entries_of_twice_the_size():
    half, single = (plan_of("sglang:d4t2+fsdp:f4", topology="h100:16", **{"sglang.dtype": d}) for d in ("bfloat16", "float32"))
    assert single.sampler.weights == 4 * parameter_count(shape_of("qwen3-8b")) / 2 == 2 * half.sampler.weights
    assert single.sampler.token == 2 * half.sampler.token
    peaks = [made.sampler.footprint.peak for made in (half, single)]
    assert peaks[0] == pytest.approx(peaks[1])  # it takes its share all the same


@pytest.mark.parametrize(
    ("mode", "topology"), [("jax:f16", "v6e:4x4"), ("sglang:d16|fsdp:f16", "h100:16"), ("jax:f8", "v5p:2x2x2")]
)
def test_a_plan_says_of_pools_over_several_hosts_what_launching_them_says(mode, topology):
    hosts = Hosts.of(Topology.parse(topology), None)
    with pytest.raises(UserError) as refused:
        job_of(config_of(mode), Where(hosts, []))
    assert shared_over_hosts(engine.allocate(config_of(mode)), hosts.topology) == str(refused.value)


@pytest.mark.parametrize(
    ("mode", "topology"),
    [("jax:f8", "v5e:2x4"), ("jax:d8+jax:f8", "v6e:4x4"), ("jax:f4", "v6e:4x4"), ("sglang:d8|fsdp:f8", "h100:16")],
)
def test_pools_that_fit_a_host_or_share_nothing_are_not_warned_of(mode, topology):
    assert shared_over_hosts(engine.allocate(config_of(mode)), Topology.parse(topology)) == ""


@pytest.mark.parametrize(
    ("keys", "prompt", "completion", "line"),
    [
        ({}, 1537, 1, "--prompt_tokens: 1537 is more than 1536: actor.mb_spec.max_tokens_per_row=2048"),
        ({}, 1536, 513, "--completion_tokens: 513 is more than gconfig.max_new_tokens=512"),
        ({"train_dataset.max_length": 100}, 101, None, "--prompt_tokens: 101 is more than 100: train_dataset.max_length"),
        ({"jax.context_length": 1024}, 1024, None, "--prompt_tokens: 1024 is more than 1023: jax.context_length=1024"),
        ({"jax.context_length": 1024}, 1023, 2, "--completion_tokens: 1025 with a prompt of 1023, and an episode"),
        ({"actor.loss": "sft"}, 2048, None, "--prompt_tokens: 2048 leaves no room for a completion in the 2048 of an episode"),
        ({"actor.loss": "sft"}, 1536, 513, "--completion_tokens: 2049 with a prompt of 1536, and an episode"),
    ],
)
def test_an_average_is_not_longer_than_the_longest(keys, prompt, completion, line):
    config = config_of("jax:d1", **{"actor.mb_spec.max_tokens_per_row": 2048, "jax.context_length": 4096} | keys)
    with pytest.raises(UserError) as refused:
        check_lengths(config, engine.allocate(config), prompt, completion)
    assert str(refused.value).startswith(line)
    fewer = (prompt, completion - 1) if completion and completion > 1 else (prompt - 1, completion)
    check_lengths(config, engine.allocate(config), *fewer)


@pytest.mark.parametrize("context", [None, 4, 17, 600, 100_000])
@pytest.mark.parametrize("row", [17, 1000])
def test_assumed_lengths_have_room_in_a_row_and_in_the_sampler_s_context(row, context):
    keys = {"actor.mb_spec.max_tokens_per_row": row, "gconfig.max_new_tokens": 16}
    load = Load.of(config_of("jax:d1", **keys), context=context)
    assert load.prompt >= 1 and 1 <= load.completion <= 16
    assert load.tokens <= min(row, context or row)


def test_the_quickstart_s_prompts_are_planned_within_its_context():
    request = Request(config_of("jax:d1", "quickstart"), shape_of("tiny"), Topology.parse("h100:1"), find_plugin)
    assert request.load.prompt + request.config.gconfig.max_new_tokens == request.config.engines["jax"].context_length


SPLITS = [("sglang:t4", True), ("sglang:t2", True), ("sglang:t3", False), ("fsdp:t4", False), ("jax:t4", True)]
SPLITS += [("jax:t3", False), ("jax:f32", True), ("jax:f3", False)]


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize(("mode", "able"), SPLITS)
def test_a_run_is_refused_a_split_of_its_model_before_anything_starts(mode, able, scratch, tmp_path):
    """4 heads, 2 key/value heads: SGLang and jax don't split these where there are more devices."""
    write_companions(tmp_path, shape_of("tiny"), "bfloat16", None)
    of_scratch = {"actor.init_from_scratch": True, "actor.init.num_heads": 4, "actor.init.num_kv_heads": 2, "actor.path": ""}
    of_scratch["actor.init.max_position_embeddings"] = 2048
    config = config_of(mode, **(of_scratch if scratch else {"actor.path": tmp_path}), **{"jax.slots": 96})
    name, _, dim = mode.partition(":")
    try:
        find_plugin(name).check_settings(config, engine.allocate(config))
    except UserError as error:
        assert not able and str(error).startswith(f"allocation_mode: {dim} does not divide the model's ")
    else:
        assert able


@pytest.mark.parametrize(("tensor", "able"), [(1, True), (2, True), (4, True), (8, True), (3, False), (6, False), (12, True)])
def test_copies_of_key_heads_are_as_many_of_each(tensor, able):
    spec = dataclasses.replace(shape_of("tiny"), num_heads=24, num_kv_heads=4)
    equal = spec.num_kv_heads % tensor == 0 or tensor % spec.num_kv_heads == 0
    assert equal == able
    if able:
        check_copied_heads(spec, tensor)
        return
    with pytest.raises(UserError, match=rf"^allocation_mode: t{tensor} is neither a divisor nor a multiple of the model's 4 "):
        check_copied_heads(spec, tensor)


@pytest.mark.parametrize(
    ("mode", "topology", "line"),
    [
        ("jax:d9", "h100:8", "allocation_mode: jax:d9 needs 9 devices, and h100:8 has 8"),
        ("fsdp:d1", "v5e:2x4", "--topology: v5e is a TPU, and fsdp"),
        ("jax:t3", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("jax:d3", "h100:8", "jax.slots: 64 is not a multiple of the 3 data shards"),
        ("fsdp:t3", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("sglang:t3+fsdp:d1", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("fake:d1", "h100:8", "allocation_mode: the engine fake can't be planned for"),
    ],
)
def test_what_can_t_be_planned_is_one_line(mode, topology, line):
    with pytest.raises(UserError, match=f"^{line}"):
        plans.plan_of(mode, topology=topology)


@pytest.mark.parametrize("topology", ["h100:2", "v5e:1x2"])
@pytest.mark.parametrize("key", ["attention", "decode_attention"])
def test_a_kernel_is_planned_for_on_the_devices_that_have_it(key, topology):
    choices = next(field for field in dataclasses.fields(JaxConfig) if field.name == key).metadata
    kernels = [name for declared in choices.values() for name in declared.choices]
    platform = Topology.parse(topology).chip.platform
    assert PLATFORMS.keys() & kernels
    for kernel in kernels:
        keys = {f"jax.{key}": kernel}
        if PLATFORMS.get(kernel, platform) == platform:
            assert plans.plan_of("jax:d1+jax:d1", topology=topology, **keys).groups
        else:
            with pytest.raises(UserError, match=f"^jax.{key}: {kernel} can't be used on .*: it needs a"):
                plans.plan_of("jax:d1+jax:d1", topology=topology, **keys)


@pytest.mark.parametrize("family", ["phi3", "olmo2", "gemma2", "opt"])
def test_a_family_without_a_plan_is_named_with_what_can_be_planned_instead(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "hidden_size": 64}))
    with pytest.raises(UserError, match=rf"^actor.path: a plan knows the layers of llama, .*{family} \(--shape=NAME"):
        shape_in(str(tmp_path))
