"""Commands for hosts that are started one by one, by ssh for example; torchrun's among them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rljax.launching.job import FILE, MASTER_PORT, SERVER_PORT, Job

_HOSTS = """\
#!/bin/bash
# Starts one host of the run {name}. On every host, with the addresses of all in the same order:
{usage}
# The same command goes on from the newest checkpoint. SIGTERM to all hosts that train saves and ends the run.
set -eu
here=$(dirname "$(realpath "$0")")
number=$1
shift
hosts=("$@")
if [ "${{#hosts[@]}}" -ne {count} ]; then
    echo "error: {count} addresses are needed, the {train} that train first, and there are ${{#hosts[@]}}" >&2
    exit 1
fi
side=train
if [ "$number" -ge {train} ]; then
    side=serve
    number=$((number - {train}))
fi
servers=$(IFS=,; echo "${{hosts[*]:{train}}}")
cd {directory}
exec {python} -m rljax.launching "$here/{file}" --side="$side" --host="$number" \\
    --head="${{hosts[0]}}" --servers="$servers" --launch="${{LAUNCH:-by hand}}" \\
    --port="${{MASTER_PORT:-{port}}}" --server_port="${{SERVER_PORT:-{server_port}}}"
"""
_TORCHRUN = """\
#!/bin/bash
# Starts the processes of one host that trains under torchrun, which starts all of them again when one fails.
# On each of the {train} hosts that train: bash torchrun.sh ADDRESS_OF_THE_FIRST{more}
set -eu
head=$1
{servers}{variables}cd {directory}
exec {python} -m torch.distributed.run --nnodes={train} --nproc-per-node={processes} \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:${{MASTER_PORT:-{port}}}" --rdzv-id={name} \\
    --max-restarts={restarts} --shutdown-timeout={grace} \\
    -m rljax train {arguments}
"""
_TOKEN = """\
servers=$2
token={token}
if [ -z "${{RLJAX_TOKEN:-}}" ]; then
    until [ -s "$token" ]; do sleep 1; done  # the servers make it
    RLJAX_TOKEN=$(cat "$token")
fi
export RLJAX_TOKEN
"""


def hosts_script(job: Job) -> str:
    """Returns the script that starts any host of the job."""
    names = " ".join(f"HOST{number}" for number in range(job.hosts))
    usage = "\n".join(f"#   {what}: bash hosts.sh {number} {names}" for number, what in enumerate(_numbered(job)))
    return _HOSTS.format(
        name=job.name,
        usage=usage,
        count=job.hosts,
        train=job.train.hosts,
        directory=shlex.quote(job.directory or "."),
        python=shlex.quote(job.python),
        file=FILE,
        port=MASTER_PORT,
        server_port=SERVER_PORT,
    )


def _numbered(job: Job) -> Iterator[str]:
    for number in range(job.hosts):
        yield f"on HOST{number}, which {'trains' if number < job.train.hosts else 'serves'}"


def torchrun_script(job: Job) -> str:
    """Returns the script that starts a host that trains under torchrun.

    Its variables give each process its rank; the servers, if there are any, are started by
    hosts.sh.
    """
    arguments = [*job.train.command, f"--workdir={job.workdir}"]
    written = " ".join(shlex.quote(argument) for argument in arguments)
    if job.serve is not None:
        written += ' --config.rollout.addr="$servers"'
    return _TORCHRUN.format(
        name=job.name,
        train=job.train.hosts,
        processes=job.train.processes,
        more=f" SERVER:{SERVER_PORT},...  (the servers: hosts.sh)" if job.serve else "",
        servers=_TOKEN.format(token=shlex.quote(f"{job.workdir}/servers/token")) if job.serve else "",
        variables="".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items()),
        directory=shlex.quote(job.directory or "."),
        python=shlex.quote(job.python),
        port=MASTER_PORT,
        restarts=job.restarts,
        grace=job.grace,
        arguments=written,
    )
