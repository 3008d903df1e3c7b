"""A JobSet for Kubernetes, with GKE's labels of TPUs: groups of hosts that know their names.

JobSet: https://jobset.sigs.k8s.io, v1alpha2. A pod's name in the network is
JOBSET-GROUP-JOB-POD.JOBSET.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from rljax.launching.job import FILE, MASTER_PORT, SERVER_PORT, Job, Side
from rljax.messaging.token import VARIABLE

MOUNT = "/etc/rljax"
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"  # label of a pod
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
TPU, GPU = "google.com/tpu", "nvidia.com/gpu"
SHARED_MEMORY = "/dev/shm"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Facts about a cluster that neither config nor topology has."""

    image: str  # a container image that has rljax and the run's own files
    claim: str  # a PersistentVolumeClaim that all pods can write (ReadWriteMany)
    mount: str  # where the volume is mounted; the run directory is below it
    gpu: str = ""  # value of cloud.google.com/gke-accelerator, for GPUs


def manifest(job: Job, cluster: Cluster) -> str:
    """Returns a ConfigMap with job.json, and the JobSet."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-job"},
        "data": {FILE: job.to_json()},
    }
    return yaml.dump_all([config, jobset(job, cluster)], Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such, for people to read."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def jobset(job: Job, cluster: Cluster) -> dict[str, Any]:
    groups = [_group(job, "train", job.train, cluster)]
    if job.serve is not None:
        groups.append(_group(job, "serve", job.serve, cluster))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["train"]},  # the servers end with the run
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": groups,
        },
    }


def addresses(job: Job, group: str) -> list[str]:
    """Returns the names of the hosts of a group, in order."""
    side = job.side(group)
    if _apart(group, side):
        return [f"{job.name}-{group}-{number}-0.{job.name}" for number in range(side.hosts)]
    return [f"{job.name}-{group}-0-{number}.{job.name}" for number in range(side.hosts)]


def _apart(group: str, side: Side) -> bool:
    """Returns whether each host is a job of its own: a TPU slice is one job."""
    return group == "serve" and bool(side.slice)


def _group(job: Job, name: str, side: Side, cluster: Cluster) -> dict[str, Any]:
    apart = _apart(name, side)
    pods = 1 if apart else side.hosts
    template: dict[str, Any] = {
        "spec": {
            "completionMode": "Indexed",
            "parallelism": pods,
            "completions": pods,
            "backoffLimit": 0,  # a lost host ends the attempt, and the JobSet starts the next
            "template": {"spec": _pod(job, name, side, cluster)},
        }
    }
    if side.slice:
        template = {"metadata": {"annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool"}}, **template}
    return {"name": name, "replicas": side.hosts if apart else 1, "template": template}


def _pod(job: Job, name: str, side: Side, cluster: Cluster) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": cluster.image,
        "workingDir": job.directory,
        "command": _command(job, name, side),
        "env": _environment(job, side, name),
        "ports": [{"containerPort": SERVER_PORT if name == "serve" else MASTER_PORT}],
        "volumeMounts": [
            {"name": "run", "mountPath": cluster.mount},
            {"name": "job", "mountPath": MOUNT, "readOnly": True},
            {"name": "memory", "mountPath": SHARED_MEMORY},
        ],
    }
    selector, resources = _devices(job, side, cluster)
    if resources:
        container["resources"] = {"requests": resources, "limits": resources}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "job", "configMap": {"name": f"{job.name}-job"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # weights on their way; Kubernetes gives 64 MB
        ],
    }


def _devices(job: Job, side: Side, cluster: Cluster) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the labels of the nodes that a group runs on, and the devices of a pod."""
    if side.slice:
        labels = {"cloud.google.com/gke-tpu-accelerator": side.accelerator, "cloud.google.com/gke-tpu-topology": side.slice}
        return labels, {TPU: side.devices}
    if job.platform == "gpu":
        return {"cloud.google.com/gke-accelerator": cluster.gpu} if cluster.gpu else {}, {GPU: side.devices}
    return {}, {}


def _command(job: Job, name: str, side: Side) -> list[str]:
    number = "JOB_INDEX" if _apart(name, side) else "JOB_COMPLETION_INDEX"
    command = [
        *(job.python, "-m", "rljax.launching", f"{MOUNT}/{FILE}", f"--side={name}", f"--host={number}"),
        *(f"--head={addresses(job, 'train')[0]}", f"--launch={job.name}.$(ATTEMPT)"),
    ]
    return [*command, f"--servers={','.join(addresses(job, 'serve'))}"] if job.serve is not None else command


def _environment(job: Job, side: Side, name: str) -> list[dict[str, Any]]:
    labels = {"ATTEMPT": ATTEMPT} | ({"JOB_INDEX": "jobset.sigs.k8s.io/job-index"} if _apart(name, side) else {})
    found = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for variable, label in labels.items()
    ]
    if job.serve is not None:
        found.append({"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}}})
    return found
