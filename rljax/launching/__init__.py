"""Starts a run on several hosts: one description of it, and a file for each way to start it.

    config, topology  -->  job.Job  -->  job.json, and files that start its hosts:
                                           by_hand.py   a command per host; torchrun's
                                           slurm.py     a batch script
                                           on_ray.py    a Ray job
                                           gke.py       a JobSet, for TPU slices and GPUs
    on each host           host.py  -->  the host's processes, with their ranks

hosts.py   how many devices a host has, and which TPU slices there are
job.py     which processes run on how many hosts, from the config alone

Whatever starts the hosts tells `python -m rljax.launching` on each of them its number, the address
of the first and those of the servers. The run itself is `rljax train`, the servers `rljax serve`.
"""

from rljax.launching.hosts import Hosts
from rljax.launching.job import Job, Side, job_of

__all__ = ["Hosts", "Job", "Side", "job_of"]
