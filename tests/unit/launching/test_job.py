"""Processes of a run on several hosts, worked out from its config and a topology."""

import re
import shlex
from pathlib import Path

import pytest

from rljax.config import io
from rljax.config.allocation import parse as parse_allocation
from rljax.engine import find_plugin
from rljax.engine.rank import from_environment
from rljax.errors import UserError
from rljax.hf.shapes import shape_of
from rljax.launching.host import Place, processes_of
from rljax.launching.hosts import SLICES, Hosts, parse, single_host
from rljax.launching.job import Job, Where, job_of
from rljax.multiprocess import find_rank
from tests.unit.launching.jobs import config_of, made

# allocation_mode, devices that train, of a host -> hosts that train, processes of each, hosts that serve
JOBS = {
    ("sglang:d4+fsdp:f4", "h100:8", None): (1, 1, 0),
    ("sglang:d4|fsdp:f4", "h100:8", None): (1, 1, 0),
    ("jax:d2+jax:f6", "v5e:2x4", None): (1, 1, 0),
    ("sglang:d8+fsdp:f16", "h100:16", None): (2, 8, 1),
    ("sglang:d8t4+fsdp:f16", "h100:16", None): (2, 8, 4),
    ("sglang:d3+fsdp:f16", "h100:16", 2): (8, 2, 3),
    ("sglang:d1+fsdp:f8", "l4:8", 1): (8, 1, 1),
    ("jax:d2+jax:f14", "v5e:4x4", None): (4, 1, 0),
    ("jax:d8+jax:f16", "v5e:4x4", None): (4, 1, 1),
    ("jax:d16+jax:f16", "v5e:4x4", None): (4, 1, 2),
    ("jax:d4t2+jax:f8t2", "v5p:2x2x4", None): (4, 1, 2),
    ("jax:d4+jax:f12", "h100:16", None): (2, 1, 0),
    ("sglang:d4+jax:f16", "h100:16", None): (2, 1, 1),
    ("jax:d1+fsdp:f2", "cpu:2", 1): (2, 1, 1),
    ("jax:d1+jax:f3", "cpu:4", 2): (2, 1, 0),
}


@pytest.mark.parametrize("case", JOBS, ids=str)
def test_a_job_has_the_hosts_and_processes_of_its_pools(case):
    mode, *_ = case
    job = made(*case)
    assert (job.train.hosts, job.train.processes, job.serve.hosts if job.serve else 0) == JOBS[case]
    if job.serve is not None:  # the servers together are the sampler's pool
        (share,) = [re.fullmatch(r"--config.allocation_mode=(.*)", each) for each in job.serve.command if "allocation" in each]
        whole, part = (parse_allocation(text, find_plugin).sampler for text in (mode, share[1]))
        assert part.size * job.serve.hosts == whole.size and part.tensor == whole.tensor


@pytest.mark.parametrize("case", [case for case in JOBS if JOBS[case][0] > 1], ids=str)
def test_the_run_takes_the_ranks_that_its_hosts_are_told(case):
    """Each rank is there once, and the run's own check of their number passes in all of them."""
    mode, topology, _ = case
    job = made(*case)
    learner = parse_allocation(mode, find_plugin).learner
    servers = tuple(f"s{number}" for number in range(job.serve.hosts if job.serve else 0))
    started = [
        process for host in range(job.train.hosts) for process in processes_of(job, "train", Place(host, "h", "one", servers))
    ]
    ranks = [from_environment(process.variables) for process in started]
    if topology.startswith("v"):  # a pod's processes find each other
        assert all(
            "--config.jax.processes=0" in process.command and rank.size == 1
            for process, rank in zip(started, ranks, strict=True)
        )
        return
    assert [rank.rank for rank in ranks] == list(range(len(started))) and {rank.size for rank in ranks} == {len(started)}
    assert {rank.address for rank in ranks} == {"h"} and {rank.launch for rank in ranks} == {"one"}
    needed = find_plugin(learner.engine).processes(config_of(mode), learner)
    assert needed in (None, len(started))


def test_the_runs_own_check_refuses_another_number_of_processes(monkeypatch):
    job = made("sglang:d8+fsdp:f16", "h100:16")
    (*_, last) = processes_of(job, "train", Place(1, "h", "one", ("s",)))
    for name, value in last.variables.items():
        monkeypatch.setenv(name, value)
    config, learner = config_of("fsdp:f16"), parse_allocation("fsdp:f16", find_plugin).learner
    process, count = find_rank(config, learner)
    assert (process.rank, process.local_rank, count) == (15, 7, 16)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (("sglang:d16|fsdp:f16", "h100:16"), "shares its devices"),
        (("jax:f16", "v5e:4x4"), "shares its devices"),
        (("jax:d1", "h100:16"), "--topology: h100:16 is 2 hosts of 8 devices, and jax:d1 takes 1 in all, which one host has"),
        (("sglang:d4+fsdp:f4", "h100:16"), "and sglang:d4+fsdp:f4 takes 8 in all"),
        (("sglang:d8+fsdp:f8", "h100:16"), "--topology: h100:16 has 16 devices, and fsdp:f8 learns on 8"),
        (("sglang:d8+fsdp:f32", "h100:16"), "and fsdp:f32 learns on 32"),
        (("sglang:d1t16+fsdp:f16", "h100:16"), "a replica of sglang:t16 takes 16 devices"),
        (("jax:d1t8+jax:f16", "v5p:2x2x4"), "a replica of jax:t8 takes 8 devices, and a host of v5p:2x2x4 has 4"),
        (("sglang:d8+fsdp:f8", "h100:16"), "does not count, as sglang is not in the processes of fsdp"),
        (("jax:d8+jax:f8", "h100:16"), "and jax:f8 learns on 8; "),
        (("jax:d4+jax:f12", "v5e:4x4"), "as jax:d4 would leave the first host none of its 4 devices"),
        (("jax:d2+jax:f12", "v5e:4x4"), "as jax:d2+jax:f12 is 14 devices"),
        (("sglang:d8+fsdp:f16", "v6e:4x4"), "v6e is a TPU, and fsdp and sglang run on GPUs"),
        (("sglang:d4+fsdp:f4", "v5e:2x4"), "v5e is a TPU, and fsdp and sglang run on GPUs"),
        (("sglang:d4+jax:f16", "v5e:4x4"), "v5e is a TPU, and fsdp and sglang run on GPUs"),
        (("jax:d2+jax:f10", "h100:12"), "no number of whole hosts of 8"),
        (("jax:d2+jax:f14", "v5e:16"), "is no slice of v5e"),
        (("jax:d2+jax:f14", "v5p:4x4"), "is no slice of v5p"),
        (("jax:d2+jax:f14", "v5e:4x4", 8), "a host of v5e:4x4 has 4 devices, not 8"),
        (("fsdp:f16", "h100:16"), "only learns"),
    ],
    ids=str,
)
def test_what_the_hosts_cannot_hold_is_refused_in_one_line(case, line):
    with pytest.raises(UserError, match=re.escape(line)) as refused:
        made(*case)
    assert "\n" not in str(refused.value)


def test_what_an_engine_refuses_wherever_it_runs_is_refused_here():
    with pytest.raises(UserError, match=r"sglang\.release_memory: is for synchronous runs"):
        made("sglang:d4|fsdp:f4", "h100:8", sglang__release_memory=True)
    made("sglang:d4|fsdp:f4", "h100:8", sglang__release_memory=True, rollout__max_head_offpolicyness=0)


def test_a_server_that_would_not_start_is_refused_once_the_model_is_known():
    """32 billion parameters are 61 GiB in bfloat16, and 0.425 of an H100's 79 GiB is 34."""
    case, share = ("sglang:d8+fsdp:f16", "h100:16"), {"sglang__mem_fraction_static": 0.425}
    known = {"model": shape_of("qwen3-32b")}
    with pytest.raises(UserError, match=r"sglang\.mem_fraction_static=0\.425 is 33\.\d\d GiB"):
        made(*case, where=known, **share)
    made(*case, where=known)


# allocation_mode and topology, of which a 576 wide model of 9 heads can't be split so
SPLITS = {
    ("jax:d2+jax:f14", "v5e:4x4"): "f14 does not divide the model's 576 elements",
    ("jax:f5", "h100:8"): "f5 does not divide the model's 576 elements",
    ("jax:d8+jax:f8t2", "h100:16"): "t2 does not divide the model's 9 attention heads",
    ("jax:d4t2+jax:f16", "v5p:2x2x4"): "t2 does not divide the model's 9 attention heads",  # of the servers
    ("sglang:d4+fsdp:f8t2", "h100:16"): "t2 does not divide the model's 9 attention heads",
}


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_a_split_that_the_model_does_not_have_is_refused_once_the_model_is_known(case):
    """Launch asks the engine's own planner, which a plan asks too."""
    known, slots = {"model": shape_of("smollm2-135m")}, {"jax__slots": 320}  # which all of these share evenly
    made(*case, **slots)
    with pytest.raises(UserError, match=re.escape(SPLITS[case])):
        made(*case, where=known, **slots)
    made("jax:d2+jax:d7f2", "v5e:4x4", where=known)


def examples():
    """Yields the commands that the page and --help show."""
    repository = Path(__file__).resolve().parents[3]
    for path in ("docs/launch.md", "experiments/launch.py"):
        text = (repository / path).read_text()
        for command in re.findall(r"python -m experiments\.launch (.*(?<!\\))$", text.replace("\\\n", ""), re.MULTILINE):
            yield dict(word.removeprefix("--").partition("=")[::2] for word in shlex.split(command))


def test_the_examples_are_of_jobs_that_can_be_started():
    found = list(examples())
    assert len(found) == 4
    for flags in found:
        keys = [(name.removeprefix("config."), value) for name, value in flags.items() if name.startswith("config.")]
        config = io.resolve(io.load(flags["config"], keys))
        hosts = Hosts.of(parse(flags["topology"]), None)
        job = job_of(config, Where(hosts=hosts, arguments=[], model=shape_of("smollm2-135m")))
        assert job.train.hosts > 1 and job.serve is not None


def test_servers_that_run_already_are_not_started(tmp_path):
    job = made("sglang:d8+fsdp:f16", "h100:16", rollout__addr="10.0.0.7:30000")
    assert job.serve is None and not any("attach" in each for each in job.train.command)


@pytest.mark.parametrize("chip", SLICES)
def test_the_devices_of_a_slice_are_those_of_its_hosts(chip):
    for shape in (*SLICES[chip].alone, "4x4" if SLICES[chip].axes == 2 else "2x2x4"):
        topology = parse(f"{chip}:{shape}")
        hosts = Hosts.of(topology, None)
        assert hosts.count * hosts.devices == topology.devices and hosts.chips <= 8
        assert (hosts.count == 1) == (shape in SLICES[chip].alone)
        alone = single_host(topology, hosts.devices)
        assert alone.count == 1 and alone.devices >= hosts.devices and alone.slice in SLICES[chip].alone


def test_a_job_is_read_back_as_it_was_written(tmp_path):
    job = made("sglang:d8+fsdp:f16", "h100:16", where={"environment": {"NCCL_DEBUG": "INFO"}})
    (tmp_path / "job.json").write_text(job.to_json())
    assert Job.from_file(tmp_path / "job.json") == job
    for text in ("", "[]", "{}", job.to_json().replace("grace", "grac")):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(UserError, match="is no job"):
            Job.from_file(tmp_path / "job.json")
    with pytest.raises(UserError, match="cannot be read"):
        Job.from_file(tmp_path / "none.json")
