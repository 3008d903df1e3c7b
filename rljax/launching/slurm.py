"""A batch script for Slurm. The first hosts of the job train, the last serve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rljax.errors import UserError
from rljax.launching.job import Job

# sbatch's options whose value may be left out. Another without one would take the next line for its value.
ALONE = (
    *("contiguous", "exclusive", "export", "get-user-env", "hold", "ignore-pbs", "nice", "no-kill", "no-requeue", "overcommit"),
    *("oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue", "spread-job", "use-min-nodes", "verbose", "wait"),
)
OF_THE_JOB = ("array", "nodes", "ntasks", "ntasks-per-node", "signal")  # of which the script relies on its own
_SCRIPT = """\
#!/bin/bash
{options}
# The run {name}: {train} hosts train, {serve} serve. Submit it again, and it goes on from the newest checkpoint.
# {grace} s before the time limit the run saves, and the job is put back into the queue. To save and stop:
#   scancel --batch --signal=INT JOB
set -u
job={job}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
servers=$(IFS=,; echo "${{hosts[*]:{train}}}")
stop=

part() {{  # SIDE FIRST_HOST COUNT LAUNCH
    exec srun --job-name="$1" --nodes="$3" --ntasks="$3" --ntasks-per-node=1 --relative="$2" --kill-on-bad-exit=1 \\
        {python} -m rljax.launching "$job" --side="$1" --host=SLURM_NODEID \\
        --head="${{hosts[0]}}" --servers="$servers" --launch="$4"
}}
tell() {{  # SIDE: asks its processes to end. A signal to srun would kill them
    squeue --steps --job="$SLURM_JOB_ID" --noheader --format="%i %j" | while read -r step name; do
        if [ "$name" = "$1" ]; then scancel --signal=USR1 "$step" 2>/dev/null; fi
    done
}}
trap 'stop=again; tell train' TERM
trap 'stop=here; tell train' INT
{servers}
attempt=0
while :; do
    part train 0 {train} "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$attempt" &
    train=$!
    wait "$train"
    status=$?
    while kill -0 "$train" 2>/dev/null; do  # a signal has ended the wait above; the run saves now
        wait "$train"
        status=$?
    done
    if [ "$status" -eq 0 ] || [ -n "$stop" ] || [ "$attempt" -ge {restarts} ]; then
        break
    fi
    attempt=$((attempt + 1))
    echo "training ended with status $status; start $((attempt + 1))" >&2
done
{end}if [ "$stop" = again ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
if [ -n "$stop" ]; then
    exit 0
fi
exit "$status"
"""
_SERVERS = """\
part serve {first} {count} "$SLURM_JOB_ID" &
serve=$!
"""
_END = """\
tell serve
wait "$serve"
"""


def batch_script(job: Job, job_file: str, options: Sequence[str]) -> str:
    """Returns the script for sbatch.

    Args:
      job_file: where every host sees job.json.
      options: further options of sbatch, as "partition=gpu".

    Raises UserError for what is no option, or is the job's own.
    """
    for option in options:
        _check(option)
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {_quoted(f'--{option}')}" for option in (*_options(job), *options)),
        name=job.name,
        train=job.train.hosts,
        serve=job.serve.hosts if job.serve else 0,
        grace=job.grace,
        job=shlex.quote(job_file),
        python=shlex.quote(job.python),
        servers=_SERVERS.format(first=job.train.hosts, count=job.serve.hosts) if job.serve else "",
        restarts=job.restarts,
        end=_END if job.serve else "",
    )


def _check(option: str) -> None:
    """Raises UserError for what sbatch would refuse or take for something else."""
    name, _, value = option.partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise UserError(f"--slurm: {option!r} is no option of sbatch (its long name and value, as in partition=gpu)")
    if name in OF_THE_JOB:
        raise UserError(f"--slurm: {name} is the script's own (nodes are those of --topology, signal is that of --grace)")
    if not value and name not in ALONE:
        raise UserError(f"--slurm: {name} needs a value, as in {name}=VALUE")


def _quoted(word: str) -> str:
    """Returns a word of an #SBATCH line, which sbatch splits at blanks.

    Those within double quotes are kept; a backslash before one does not keep it.
    """
    if "\n" in word:
        raise UserError(f"--to=slurm: a line of its script cannot hold the line break of {word!r}")
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def _options(job: Job) -> list[str]:
    workdir = job.workdir.replace("%", "%%")  # %j is the job's number
    options = [
        f"job-name={job.name}",
        f"nodes={job.hosts}",
        "ntasks-per-node=1",
        "exclusive",
        f"signal=B:TERM@{job.grace}",
        "requeue",
        "open-mode=append",
        f"output={workdir}/slurm-%j.txt",
    ]
    devices = max(job.train.devices, job.serve.devices if job.serve else 0)
    if job.platform == "gpu":
        options.append(f"gpus-per-node={devices}")
    if job.directory:
        options.append(f"chdir={job.directory}")
    return options
