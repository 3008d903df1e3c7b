"""Writes the files that start a run on several hosts: by hand, torchrun, Slurm, Ray, or Kubernetes.

    python -m experiments.launch --config=configs/smollm2_gsm8k.py \
        --config.allocation_mode=sglang:d8+fsdp:f16 --topology=h100:16 \
        --workdir=/shared/run --directory=/shared/code --out=/shared/launch
    python -m experiments.launch --config=configs/smollm2_gsm8k.py \
        --config.allocation_mode=jax:d8+jax:f16 --topology=v5e:4x4 \
        --workdir=/data/run --directory=/data/code --out=launch --to=gke --image=IMAGE --claim=CLAIM

--topology names the devices of the processes that train; where allocation_mode has a sampler that
those processes can't hold, servers on hosts of their own, which --topology does not count, are
started beside them. Nothing is started here, and neither jax nor torch is needed (docs/launch.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags, logging

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.hf.spec import ModelSpec
    from rljax.launching import Job

WAYS = ("hand", "torchrun", "slurm", "ray", "gke")
FILES = ("job.json", "hosts.sh", "torchrun.sh", "slurm.sh", "ray.sh", "jobset.yaml")
main.define_config_flags(what="Directory of the run, which all hosts see under this name.")
TOPOLOGY = flags.DEFINE_string("topology", "", "Devices of the hosts that train, as h100:16, v5e:4x4 (a slice), or cpu:4.")
PER_HOST = flags.DEFINE_integer("devices_per_host", None, "Devices of a host. None: 8 GPUs, or as the slice.", lower_bound=1)
OUT = flags.DEFINE_string("out", "", "Directory for the files, which all hosts see under this name.")
TO = flags.DEFINE_list("to", list(WAYS[:4]), f"Ways to start it: {', '.join(WAYS)}.")
DIRECTORY = flags.DEFINE_string("directory", "", "Directory of every process on the hosts. Empty: this one.")
PYTHON = flags.DEFINE_string("python", "python", "Interpreter on the hosts that has rljax.")
NAME = flags.DEFINE_string("name", "rljax", "Name of the job.")
ENVIRONMENT = flags.DEFINE_multi_string("env", [], "NAME=VALUE of an environment variable; may be given several times.")
RESTARTS = flags.DEFINE_integer("restarts", 3, "Times that a run which failed is started again.", lower_bound=0)
GRACE = flags.DEFINE_integer("grace", 300, "Seconds that a run has to save when it is told to stop.", lower_bound=1)
SLURM = flags.DEFINE_multi_string("slurm", [], "Option of sbatch, as partition=gpu; may be given several times.")
IMAGE = flags.DEFINE_string("image", "", "Container image with rljax, for gke.")
CLAIM = flags.DEFINE_string("claim", "", "PersistentVolumeClaim with the run and its data, for gke.")
MOUNT = flags.DEFINE_string("mount", "/data", "Where the claim is mounted, for gke.")
GPU = flags.DEFINE_string("gke_gpu", "", "Value of the node label gke-accelerator, for GPUs, as nvidia-h100-80gb.")


def launch() -> None:
    config, workdir = main.config_from_flags(), main.workdir_from_flags()
    if not TOPOLOGY.value:
        raise UserError("--topology: missing (the devices that train, such as h100:16 or v5e:4x4)")
    if not OUT.value:
        raise UserError("--out: missing (a directory for the files, which all hosts see)")
    for way in TO.value:
        if way not in WAYS:
            raise UserError(f"--to: no way to start a run is called {way!r} ({', '.join(WAYS)})")
    from rljax.config import checks, io
    from rljax.launching.hosts import Hosts, parse
    from rljax.launching.job import FILE, Where, job_of, topology_line

    checks.check(config)
    hosts = Hosts.of(parse(TOPOLOGY.value), PER_HOST.value)
    where = Where(
        hosts=hosts,
        arguments=_arguments(),
        model=_model(config),
        name=_name(),
        workdir=str(workdir.absolute()),
        directory=DIRECTORY.value or str(Path.cwd()),
        python=PYTHON.value,
        environment=_environment(),
        restarts=RESTARTS.value,
        grace=GRACE.value,
    )
    job = job_of(io.resolve(config), where)
    out = Path(OUT.value).absolute()
    files = {FILE: job.to_json()} | {name: text for way in TO.value for name, text in _WRITERS[way](job, out).items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)  # of an earlier job, which may have needed others
        for name, text in files.items():
            (out / name).write_text(text)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    print(f"{job.name}: {topology_line(job)}")
    for name in files:
        print(out / name)


def _model(config: Config) -> ModelSpec | None:
    """Returns the model's shape; None, with a warning, where its directory is only on the hosts."""
    from rljax.planning.model_shape import missing, shape_here

    if not (directory := missing(config.actor)):
        return shape_here(config.actor)
    logging.warning(
        "actor.path: no model in %r here, so it is not checked that allocation_mode can split it"
        " (experiments.plan --shape=NAME does, for a published one)",
        directory,
    )
    return None


def _arguments() -> list[str]:
    """Returns --config and its keys, for the command lines of the hosts."""
    keys = [f"--config.{key}" if text is None else f"--config.{key}={text}" for key, text in main.overrides_from_flags()]
    return [f"--config={main.FLAGS.config}", *keys]


def _name() -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", NAME.value):
        raise UserError(f"--name: {NAME.value!r} is no name for a job (a-z, 0-9 and -, at most 40, beginning with a letter)")
    return NAME.value


def _environment() -> dict[str, str]:
    """Returns the variables of --env. Raises UserError for secrets, which would stand in a file."""
    from rljax.process.environment import without_secrets

    pairs = dict(pair.partition("=")[::2] for pair in ENVIRONMENT.value)
    for pair in ENVIRONMENT.value:
        name, equals, _ = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not equals:
            raise UserError(f"--env: {pair!r} is not NAME=VALUE")
        if not without_secrets({name: ""}):
            raise UserError(f"--env: {name} is a secret, and would be written into a file (set it where the hosts start)")
    return pairs


def _by_hand(job: Job, out: Path) -> dict[str, str]:
    from rljax.launching.by_hand import hosts_script

    return {"hosts.sh": hosts_script(job)}


def _torchrun(job: Job, out: Path) -> dict[str, str]:
    from rljax.launching.by_hand import torchrun_script

    return {"torchrun.sh": torchrun_script(job)} if job.train.ranked else {}


def _slurm(job: Job, out: Path) -> dict[str, str]:
    from rljax.launching.slurm import batch_script

    return {"slurm.sh": batch_script(job, str(out / "job.json"), SLURM.value)}


def _ray(job: Job, out: Path) -> dict[str, str]:
    from rljax.launching.on_ray import submit_script

    return {"ray.sh": submit_script(job)}


def _gke(job: Job, out: Path) -> dict[str, str]:
    from rljax.launching.gke import Cluster, manifest

    for flag, value in (("image", IMAGE.value), ("claim", CLAIM.value)):
        if not value:
            raise UserError(f"--{flag}: missing, and --to=gke needs it ({flags.FLAGS[flag].help.rstrip('.')})")
    if not Path(job.workdir).is_relative_to(MOUNT.value):
        raise UserError(f"--workdir: {job.workdir} is not below --mount={MOUNT.value}, so no other pod would see it")
    return {"jobset.yaml": manifest(job, Cluster(IMAGE.value, CLAIM.value, MOUNT.value, GPU.value))}


_WRITERS: dict[str, Callable[[Job, Path], dict[str, str]]] = dict(
    zip(WAYS, (_by_hand, _torchrun, _slurm, _ray, _gke), strict=True)
)

if __name__ == "__main__":
    main.run_main(launch)
