"""Runs a job on a Ray cluster: `python -m rljax.launching.on_ray JOB.json`, the driver of ray.sh.

Ray places a bundle per host, each on a node of its own, and one actor per bundle runs what the host
has to run (host.py). When training fails, all of it is started again, and goes on from the newest
checkpoint; servers live on. SIGTERM to the driver, as `ray job stop` sends it, has the run save.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.errors import UserError
from rljax.launching.job import FILE, Job, Side

RESOURCES = {"gpu": "GPU", "tpu": "TPU"}  # Ray's names
PLACEMENT_TIMEOUT = 600.0  # seconds
POLL = 1.0
_SCRIPT = """\
#!/bin/bash
# Submits the run {name} to the Ray cluster of RAY_ADDRESS (http://HEAD:8265). Submit it again, and it goes on.
# ray job stop saves and ends it; give the cluster {grace} s for it: RAY_JOB_STOP_WAIT_TIME_S={grace} on the head node.
set -eu
here=$(dirname "$(realpath "$0")")
exec ray job submit --address="${{RAY_ADDRESS:?}}" --submission-id="{name}-$(date +%s)" "$@" -- \\
    {python} -m rljax.launching.on_ray "$here/{file}"
"""


def submit_script(job: Job) -> str:
    """Returns the script that submits the job."""
    return _SCRIPT.format(name=job.name, grace=job.grace, python=shlex.quote(job.python), file=FILE)


class Host:
    """One host of a job, in an actor: a process of `python -m rljax.launching`."""

    def __init__(self, job_file: str, side: str, number: int) -> None:
        self._job, self._side, self._number = job_file, side, number
        self._process: subprocess.Popen[bytes] | None = None

    def facts(self) -> tuple[str, int, int]:
        """Returns the node's address, and two ports of it that are free."""
        import ray

        from rljax.engine.rank import free_port

        address = ray.util.get_node_ip_address()
        return address, free_port(address), free_port(address)

    def start(self, head: str, port: int, servers: Sequence[tuple[str, int]], launch: str) -> None:
        from rljax.process.parent import die_with

        own = servers[self._number][1] if self._side == "serve" else 0
        parent, job = os.getpid(), Job.from_file(Path(self._job))
        command = [
            *(job.python, "-m", "rljax.launching", self._job, f"--side={self._side}", f"--host={self._number}"),
            *(f"--head={head}", f"--port={port}", f"--launch={launch}", f"--server_port={own}"),
            "--servers=" + ",".join(f"{address}:{port}" for address, port in servers),
        ]
        self._process = subprocess.Popen(command, cwd=job.directory or None, preexec_fn=lambda: die_with(parent))

    def status(self) -> int | None:
        """Returns the exit status of the process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Tells the process to save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()


def bundles(job: Job) -> list[dict[str, float]]:
    """Returns what each host asks of Ray: those that train, then those that serve."""
    sides = [job.train, *([job.serve] if job.serve else [])]
    return [_bundle(job, side) for side in sides for _ in range(side.hosts)]


def _bundle(job: Job, side: Side) -> dict[str, float]:
    name = RESOURCES.get(job.platform)
    return {"CPU": 1.0} | ({name: float(side.devices)} if name else {})


class Driver:
    """Places a job on the cluster that this process is connected to, and runs it to its end."""

    def __init__(self, job: Job, job_file: Path) -> None:
        """Waits for the hosts. Raises UserError if the cluster can't give them."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._job, self._stopped = ray, job, False
        wanted = bundles(job)
        self._group = placement_group(wanted, strategy="STRICT_SPREAD")
        if not self._group.wait(PLACEMENT_TIMEOUT):
            ray.util.remove_placement_group(self._group)
            raise UserError(
                f"ray: no {len(wanted)} nodes with {wanted[0]} each are free after {PLACEMENT_TIMEOUT:.0f} s (ray status)"
            )
        actor = ray.remote(Host)

        def place(side: str, number: int, bundle: int) -> Any:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            options = wanted[bundle]
            cpus, gpus = options["CPU"], options.get("GPU", 0)
            others = {name: amount for name, amount in options.items() if name not in ("CPU", "GPU")}
            made = actor.options(
                scheduling_strategy=strategy, num_cpus=cpus, num_gpus=gpus, resources=others, max_concurrency=2
            )
            return made.remote(str(job_file), side, number)

        train = job.train.hosts
        self._train = [place("train", number, number) for number in range(train)]
        self._serve = [place("serve", number, train + number) for number in range(len(wanted) - train)]

    def run(self) -> int:
        """Runs the job. Returns the exit status of training."""
        facts = self._ray.get([host.facts.remote() for host in self._train])
        servers = [(address, port) for address, port, _ in self._ray.get([host.facts.remote() for host in self._serve])]
        (head, *ports), launch = facts[0], f"{self._job.name}-{int(time.time())}"
        self._start(self._serve, head, 0, servers, launch)
        for attempt in range(1 + self._job.restarts):
            self._start(self._train, head, ports[attempt % 2], servers, f"{launch}.{attempt}")
            status = self._wait()
            if status == 0 or self._stopped:
                break
            print(f"training ended with status {status} (start {attempt + 1})", file=sys.stderr, flush=True)
        return status

    def _start(self, hosts: Sequence[Any], head: str, port: int, servers: Sequence[tuple[str, int]], launch: str) -> None:
        self._ray.get([host.start.remote(head, port, servers, launch) for host in hosts])

    def _wait(self) -> int:
        """Waits until all hosts that train have ended. Returns the status of the one that failed
        first, 0 if none did: the others may then end by the signal that stops them.
        """
        failed = 0
        while True:
            found = self._ray.get([host.status.remote() for host in self._train])
            failed = failed or next((int(status) for status in found if status), 0)
            if None not in found:
                return 128 - failed if failed < 0 else failed
            if failed:
                self.stop_training()
            time.sleep(POLL)

    def stop(self) -> None:
        """Has the run save and end, and does not start it again."""
        self._stopped = True
        self.stop_training()

    def stop_training(self) -> None:
        for host in self._train:
            host.stop.remote()

    def close(self) -> None:
        """Ends the servers, and gives the hosts back."""
        for host in self._serve:
            self._ray.get(host.stop.remote())
        for host in [*self._train, *self._serve]:
            self._ray.kill(host)
        self._ray.util.remove_placement_group(self._group)


def main() -> None:
    try:
        path = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else Path(FILE).absolute()
        job = Job.from_file(path)
        try:
            import ray
        except ImportError:
            raise UserError("ray is not installed (pip install ray)") from None
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
        driver = Driver(job, path)
        signal.signal(signal.SIGTERM, lambda number, frame: driver.stop())
        signal.signal(signal.SIGINT, lambda number, frame: driver.stop())
        try:
            status = driver.run()
        finally:
            driver.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
