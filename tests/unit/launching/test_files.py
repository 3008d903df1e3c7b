"""The files that start a job: run with programs that stand in for the cluster's, and held to its rules."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rljax.errors import UserError
from rljax.launching.by_hand import hosts_script, torchrun_script
from rljax.launching.gke import Cluster, addresses, jobset, manifest
from rljax.launching.job import Job
from rljax.launching.on_ray import bundles, submit_script
from rljax.launching.slurm import batch_script
from tests.unit.launching.jobs import made

MODES = {
    "servers": ("sglang:d16+fsdp:f16", "h100:16"),
    "one host": ("sglang:d4+fsdp:f4", "h100:8"),
    "pod": ("jax:d8+jax:f16", "v5e:4x4"),
    "pod and servers": ("jax:d16+jax:f16", "v5e:4x4"),
    "no accelerators": ("jax:d1+jax:f3", "cpu:4", 2),
}
CLUSTER = Cluster("registry/image:1", "shared", "/data", "nvidia-h100-80gb")
AWKWARD = {"workdir": "/data/a run", "directory": "/data/it's code", "environment": {"A": "b 'c' $d"}}


def scripts(job):
    return {
        "hosts.sh": hosts_script(job),
        "torchrun.sh": torchrun_script(job),
        "slurm.sh": batch_script(job, "/data/a run/job.json", ["partition=gpu"]),
        "ray.sh": submit_script(job),
    }


@pytest.mark.parametrize("mode", MODES)
def test_scripts_are_sound(mode, tmp_path):
    for name, text in scripts(made(*MODES[mode], where=AWKWARD)).items():
        (tmp_path / name).write_text(text)
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
        if shutil.which("shellcheck"):
            done = subprocess.run(
                ["shellcheck", "--severity=warning", tmp_path / name], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout


def stub(directory: Path, name: str, body: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/bash\n{body}\n")
    (directory / name).chmod(0o755)


def run_script(path, *arguments, path_first, **variables):
    environment = os.environ | {"PATH": f"{path_first}:{os.environ['PATH']}", "LOG": str(path_first / "log")} | variables
    return subprocess.run(["bash", path, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=60)


@pytest.mark.parametrize("name", ["hosts.sh", "torchrun.sh", "ray.sh"])
def test_names_with_blanks_and_quotes_reach_the_commands_whole(name, tmp_path):
    python = tmp_path / "my bin" / "py"
    where = {"workdir": '/data/a "run" #1', "directory": str(tmp_path / "it's code"), "python": str(python)}
    job = made(*MODES["servers"], where=where)
    for command in ("my bin/py", "bin/ray"):
        stub((tmp_path / command).parent, Path(command).name, 'printf "%s\\n" "$0" "$PWD" "$@"')
    (tmp_path / "it's code").mkdir()
    (tmp_path / name).write_text(scripts(job)[name])
    arguments = {"hosts.sh": ["0", *(f"h{number}" for number in range(job.hosts))], "torchrun.sh": ["h0", "s0"], "ray.sh": []}
    variables = {"RLJAX_TOKEN": "x", "RAY_ADDRESS": "http://head"}
    (tmp_path / "servers").mkdir()
    script = (tmp_path / name).read_text().replace("until [ -s", "until true || [ -s")  # there is no server to make the token
    (tmp_path / name).write_text(script)
    done = run_script(tmp_path / name, *arguments[name], path_first=tmp_path / "bin", **variables)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and job.python in lines, done.stderr
    if name != "ray.sh":
        assert lines[1] == job.directory
    if name == "torchrun.sh":
        assert f"--workdir={job.workdir}" in lines


def words(line):
    """Splits a line as sbatch does: at blanks outside double quotes, in which a backslash makes the next character plain."""
    return shlex.split(line, comments=True)


@pytest.mark.parametrize("workdir", ["/data/run", "/data/a run", "/a/it's #1", '/a/"b" $HOME', "/a/b\\ c", "/a/100% é"])
def test_an_option_of_a_batch_script_is_one_word_whatever_is_in_it(workdir):
    job = made(*MODES["servers"], where={"workdir": workdir, "directory": workdir})
    text = batch_script(job, "/job.json", [f"comment={workdir}"])
    found = [words(line.removeprefix("#SBATCH")) for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(len(option) == 1 for option in found)
    given = dict(word.removeprefix("--").partition("=")[::2] for (word,) in found)
    assert given["chdir"] == given["comment"] == workdir
    assert given["output"].replace("%%", "%") == f"{workdir}/slurm-%j.txt" and given["output"].count("%j") == 1


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("partition", "--slurm: partition needs a value, as in partition=VALUE"),
        ("time=", "--slurm: time needs a value"),
        ("--partition=gpu", "'--partition=gpu' is no option of sbatch (its long name and value, as in partition=gpu)"),
        ("my partition=gpu", "is no option of sbatch"),
        ("nodes=2", "--slurm: nodes is the script's own"),
        ("comment=a\nrm", "cannot hold the line break"),
    ],
)
def test_what_sbatch_would_take_for_something_else_is_refused(option, line):
    """An option without its value takes the next line for it: the job would be sent to a partition --time=1."""
    with pytest.raises(UserError, match=re.escape(line)):
        batch_script(made(*MODES["servers"]), "/job.json", [option])
    for good in ("exclusive", "hold", "time=1:00", "mail-type=END"):
        batch_script(made(*MODES["servers"]), "/job.json", [good])


def test_every_host_that_is_started_by_hand_gets_its_part(tmp_path):
    job = made(*MODES["servers"], where={"directory": str(tmp_path), "python": "py"})
    stub(tmp_path / "bin", "py", 'printf "%s\\n" "$@"')
    (tmp_path / "hosts.sh").write_text(hosts_script(job))
    hosts = [f"h{number}" for number in range(job.hosts)]
    parts = []
    for number in range(job.hosts):
        done = run_script(tmp_path / "hosts.sh", str(number), *hosts, path_first=tmp_path / "bin")
        given = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        assert given["--head"] == "h0" and given["--servers"] == "h2,h3"
        parts.append((given["--side"], given["--host"]))
    assert parts == [("train", "0"), ("train", "1"), ("serve", "0"), ("serve", "1")]
    done = run_script(tmp_path / "hosts.sh", "0", "h0", path_first=tmp_path / "bin")
    assert done.returncode == 1 and done.stderr == "error: 4 addresses are needed, the 2 that train first, and there are 1\n"


SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[0-3]"}


@pytest.mark.parametrize(("fails", "starts", "status"), [(0, 1, 0), (2, 3, 0), (9, 4, 4)])
def test_a_batch_job_starts_training_again_after_a_failure_and_ends_its_servers(tmp_path, fails, starts, status):
    job = made(*MODES["servers"], where={"python": "py"})
    bin_ = tmp_path / "bin"
    stub(bin_, "scontrol", "printf 'n0\\nn1\\nn2\\nn3\\n'")
    stub(bin_, "squeue", "echo '5.0 serve'; echo '5.1 train'")
    stub(bin_, "scancel", 'echo "scancel $*" >> "$LOG"; touch "$LOG.end"')
    stub(
        bin_,
        "srun",
        f"""echo "srun $*" >> "$LOG"
if [[ "$*" == *--side=serve* ]]; then until [ -e "$LOG.end" ]; do sleep 0.02; done; exit 0; fi
n=$(grep -c -- --side=train "$LOG"); [ "$n" -gt {fails} ] || exit 4""",
    )
    (tmp_path / "slurm.sh").write_text(batch_script(job, "/data/job.json", []))
    done = run_script(tmp_path / "slurm.sh", path_first=bin_, **SLURM)
    log = (bin_ / "log").read_text().splitlines()
    trained = [line for line in log if "--side=train" in line]
    assert done.returncode == status and len(trained) == starts, done.stderr
    assert len({line.rpartition("--launch=")[2] for line in trained}) == starts
    assert all("--relative=0" in line and "--nodes=2" in line and "--servers=n2,n3" in line for line in trained)
    (served,) = [line for line in log if "--side=serve" in line]
    assert "--relative=2" in served  # a line that a busy machine may write last
    assert log.index("scancel --signal=USR1 5.0") > log.index(trained[-1])


@pytest.mark.parametrize(("sent", "requeued"), [("TERM", True), ("INT", False)])
def test_a_batch_job_that_is_told_to_stop_waits_for_the_save(tmp_path, sent, requeued):
    job = made(*MODES["no accelerators"], where={"python": "py"})
    bin_ = tmp_path / "bin"
    stub(bin_, "scontrol", 'echo "scontrol $*" >> "$LOG"; printf "n0\\nn1\\n"')
    stub(bin_, "squeue", "echo '5.0 train'")
    stub(bin_, "scancel", 'echo "scancel $*" >> "$LOG"')
    stub(
        bin_, "srun", f'kill -{sent} $PPID; until grep -q "scancel" "$LOG"; do sleep 0.02; done; echo saved >> "$LOG"; exit 143'
    )
    (tmp_path / "slurm.sh").write_text(batch_script(job, "/data/job.json", []))
    done = run_script(tmp_path / "slurm.sh", path_first=bin_, **SLURM)
    log = (bin_ / "log").read_text().splitlines()
    assert done.returncode == 0 and log[1:3] == ["scancel --signal=USR1 5.0", "saved"]
    assert log[3:] == (["scontrol requeue 5"] if requeued else [])


def test_a_batch_script_asks_for_every_host_and_its_devices():
    job = made(*MODES["servers"])
    options = [line for line in batch_script(job, "/job.json", ["partition=gpu"]).splitlines() if line.startswith("#SBATCH")]
    for wanted in ("nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "requeue", f"signal=B:TERM@{job.grace}", "partition=gpu"):
        assert f"#SBATCH --{wanted}" in options
    assert not any("gpus" in line for line in batch_script(made(*MODES["no accelerators"]), "j", []).splitlines())


@pytest.mark.parametrize("mode", MODES)
def test_ray_is_asked_for_a_bundle_per_host(mode):
    job = made(*MODES[mode])
    wanted = bundles(job)
    name = {"gpu": "GPU", "tpu": "TPU"}.get(job.platform)
    assert len(wanted) == job.hosts
    if name:
        assert [bundle[name] for bundle in wanted[: job.train.hosts]] == [job.train.devices] * job.train.hosts


@pytest.mark.parametrize("mode", MODES)
def test_a_jobset_has_a_pod_for_every_host_and_its_devices(mode, tmp_path):
    job = made(*MODES[mode])
    config, made_set = yaml.safe_load_all(manifest(job, CLUSTER))
    (tmp_path / "job.json").write_text(config["data"]["job.json"])
    assert Job.from_file(tmp_path / "job.json") == job and made_set == jobset(job, CLUSTER)
    groups = {group["name"]: group for group in made_set["spec"]["replicatedJobs"]}
    assert set(groups) == ({"train", "serve"} if job.serve else {"train"})
    for name, group in groups.items():
        side, spec = job.side(name), group["template"]["spec"]
        assert spec["parallelism"] == spec["completions"] and group["replicas"] * spec["parallelism"] == side.hosts
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        devices = container.get("resources", {}).get("limits", {})
        assert sum(devices.values()) == side.devices and set(devices) <= {"google.com/tpu", "nvidia.com/gpu"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        if side.slice:  # a slice is one job, on a node pool of its own
            rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
            assert rows * columns == spec["parallelism"] * side.devices
            assert group["template"]["metadata"]["annotations"]
        assert pod["terminationGracePeriodSeconds"] == job.grace
        assert len(addresses(job, name)) == len(set(addresses(job, name))) == side.hosts
        assert f"--head={addresses(job, 'train')[0]}" in container["command"]


@pytest.mark.parametrize("mode", MODES)
def test_a_jobset_is_one_by_the_models_of_jobset_and_kubernetes(mode):
    """Needs kubeflow-trainer-api (models made from JobSet's CRD) and kubernetes-validate, from PyPI."""
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set", reason="needs kubeflow-trainer-api")
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    config, found = yaml.safe_load_all(manifest(made(*MODES[mode]), CLUSTER))
    kubernetes.validate(config, "1.33", strict=True)
    assert contains(models.JobsetV1alpha2JobSet.from_dict(found).to_dict(), json.loads(json.dumps(found)))
    for group in found["spec"]["replicatedJobs"]:
        template = group["template"]
        head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"} | template.get("metadata", {})}
        kubernetes.validate(head | {"spec": template["spec"]}, "1.33", strict=True)


def contains(whole, part):
    """Returns whether a model kept all that it was given: it drops keys that it doesn't know."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part
