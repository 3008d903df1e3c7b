"""Doors of a run with a real SGLang server: what listens where, and who has the server's key.

On the CPU, or with RLJAX_SGLANG_DEVICE=cuda on a machine with two GPUs:

    RLJAX_SGLANG_DEVICE=cuda pytest -m slow tests/contract/test_sglang_doors.py
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
import urllib.error
import urllib.request

import psutil
import pytest

from rljax.engines.http.launcher import KEY_VARIABLE
from rljax.testing.models import make_model
from tests.contract.test_sglang_runs import TINY, check, finished, metrics, processes, servers_of, started
from tests.shared import sglang_device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 8
ON_GPUS = sglang_device() == "cuda"
MODES = [("sglang:d1+fsdp:d1", "nccl"), ("sglang:d2|fsdp:f2", "ipc")] if ON_GPUS else [("sglang:d1+fsdp:f2", "gloo")]


@pytest.mark.parametrize(("mode", "transport"), MODES)
def test_everything_listens_on_loopback_and_a_servers_key_is_the_runs_alone(mode, transport, tmp_path):
    model = make_model(tmp_path / "tiny", max_position_embeddings=1024, initializer_range=0.1)
    workdir = tmp_path / "run"
    dtype = {"sglang.dtype": "bfloat16"} if ON_GPUS else {}
    flags = {"actor.path": model, "allocation_mode": mode, "sglang.transport": transport, "total_train_steps": STEPS}
    run = started(workdir, "quickstart", TINY | dtype | flags)
    try:
        while len(metrics(workdir)) < 2:  # weights have been published by then, so all groups and stores are there
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.2)
        servers = servers_of(workdir)
        of_sglang = {p.pid for server in servers for p in [server, *server.children(recursive=True)]}
        ours = [process for process in processes(workdir) if process.pid not in of_sglang]
        open_at = {door for process in ours for door in doors(process)}
        assert open_at and all(door.is_loopback for door in open_at), open_at
        assert servers
        for server in servers:
            check_key(server)
        check(finished(run, workdir), STEPS, lag=2)
    finally:
        for process in processes(workdir):
            with contextlib.suppress(psutil.Error):
                process.kill()


def doors(process: psutil.Process) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Returns the addresses on which a process listens."""
    found = set()
    with contextlib.suppress(psutil.Error):  # it has ended
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                address = ipaddress.ip_address(connection.laddr.ip)
                found.add(getattr(address, "ipv4_mapped", None) or address)
    return found


def check_key(server: psutil.Process) -> None:
    """Checks that no command line has the server's key, and that its API does nothing without it."""
    key, port = server.environ()[KEY_VARIABLE], port_of(server)
    for process in psutil.process_iter(["cmdline"]):
        assert key not in " ".join(process.info["cmdline"] or ())
    assert status(port, "/get_model_info", key) == 200
    for path in ("/get_model_info", "/generate", "/update_weights_from_disk", "/pause_generation"):
        for wrong in (None, "", key[:-1]):
            assert status(port, path, wrong) == 401, path


def port_of(server: psutil.Process) -> int:
    command = server.cmdline()
    return int(command[command.index("--port") + 1])


def status(port: int, path: str, key: str | None) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
