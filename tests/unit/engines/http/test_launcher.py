"""Starting, watching and stopping servers.

A small process stands in for SGLang, which tests/contract starts for real.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from rljax.config.allocation import Pool
from rljax.engine import find_plugin
from rljax.engine.rank import LOOPBACK, free_port
from rljax.engines.http import launcher, reaper
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.launcher import Process, SglangServers, environment, installed_release, launch_command
from rljax.errors import UserError
from rljax.testing.models import config_of, make_model
from tests.processes import is_running, running_children
from tests.shared import REPOSITORY

STAND_IN = """
import argparse, http.server, json, os, subprocess, sys, time
here = os.path.dirname(__file__)
parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
given, rest = parser.parse_known_args()
args = dict(zip(rest[::2], rest[1::2]))
def once(name):
    path = os.path.join(here, name)
    if os.path.exists(path):
        os.remove(path)
        return True
    return False
print("arguments", sys.argv[1:], flush=True)
if once("port"):
    sys.exit("[Errno 98] Address already in use")
if os.path.exists(os.path.join(here, "broken")):
    print("ValueError: no such attention backend", flush=True)
    sys.exit(3)
if os.path.exists(os.path.join(here, "alone")):
    print("RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.", flush=True)
    sys.exit(1)
if os.path.exists(os.path.join(here, "mute")):
    time.sleep(600)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health" and self.headers["Authorization"] != "Bearer " + given.api_key:
            self.send_error(401)
            return
        info = {"version": "0.5.23", "model_path": args["--model-path"], "weight_version": args["--weight-version"],
                "disable_overlap_schedule": False, "context_length": 64}
        body = b"" if self.path == "/health" else json.dumps(info).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(args["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    """Makes a package `sglang` that only the servers find."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    info = tmp_path / "site" / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return package


def config(tmp_path: Path, **options):
    sglang = {f"sglang.{key}": value for key, value in options.items()}
    return config_of(
        **({"sglang.device": "cpu", "sglang.log_dir": str(tmp_path / "logs"), "sglang.start_timeout": 30.0} | sglang)
    )


def gone(pids: list[int], within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.02)
    return False


def test_servers_start_on_their_own_ports_and_stop_with_their_children(stand_in, tmp_path, monkeypatch):
    """Their key may look like an option."""
    monkeypatch.setattr("rljax.engines.http.launcher.secrets.token_urlsafe", lambda: "-a-key-of-letters-and-hyphens")
    before = running_children()
    servers = SglangServers(config(tmp_path), Pool("sglang", data=2), tmp_path)
    started = [p.pid for p in running_children() if p not in before]
    assert len({remote.base for remote in servers.remotes}) == 2
    assert servers.remotes[0].info.overlapped and servers.remotes[0].info.context_length == 64
    assert servers.died(0) is None and len(started) == 6  # a reaper, a server and its child, twice
    key = servers.remotes[0]._token
    assert key and not any(key in " ".join(psutil.Process(pid).cmdline()) for pid in started)
    servers.close()
    assert gone(started)


def test_no_server_reads_a_model_that_the_learner_reads_otherwise(tmp_path):
    """A tied model whose file has another head: SGLang drops it. The interpreter is not even looked for."""
    model_dir = make_model(tmp_path / "model")
    arrays = load_file(model_dir / "model.safetensors")
    head = arrays["model.embed_tokens.weight"] + 1
    save_file(arrays | {"lm_head.weight": head}, model_dir / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight.*tie_word_embeddings"):
        SglangServers(config(tmp_path, python=str(tmp_path / "none")), Pool("sglang"), model_dir)


def with_a_nan(model_dir: Path) -> Path:
    arrays = load_file(model_dir / "model.safetensors")
    arrays["model.norm.weight"][3] = np.nan
    save_file(arrays, model_dir / "model.safetensors")
    return model_dir


NAN = r"model\.safetensors: tensor 'model\.norm\.weight' has NaN or infinity, 1 of"


def test_servers_without_a_learner_load_no_model_that_is_damaged(stand_in, tmp_path):
    """Reads the directory without a learner alone: a learner has read the same one."""
    model_dir, plugin, pool = make_model(tmp_path / "model"), find_plugin("sglang"), Pool("sglang")
    asyncio.run(plugin.make_lone_sampler(config(tmp_path), pool, model_dir).close())
    with_a_nan(model_dir)
    with pytest.raises(UserError, match=NAN):
        plugin.make_lone_sampler(config(tmp_path, python=str(tmp_path / "none")), pool, model_dir)  # before it is looked for
    asyncio.run(plugin.make_sampler(config(tmp_path), pool, model_dir).close())


@pytest.mark.parametrize("version", [0, 3])
def test_the_model_of_a_server_that_runs_already_is_read_while_it_has_its_weights(stand_in, tmp_path, monkeypatch, version):
    """A published version has other weights than its directory."""
    model_dir = make_model(tmp_path / "model")

    def of_version(*given):
        command = launch_command(*given)
        command[command.index("--weight-version") + 1] = str(version)
        return command

    monkeypatch.setattr(launcher, "launch_command", of_version)
    servers = SglangServers(config(tmp_path), Pool("sglang"), model_dir)
    try:
        monkeypatch.setenv("RLJAX_TOKEN", servers.remotes[0]._token)
        attached, plugin = config_of(**{"rollout.addr": servers.remotes[0].base}), find_plugin("http")
        asyncio.run(plugin.make_lone_sampler(attached, Pool("http"), tmp_path).close())
        with_a_nan(model_dir)
        asyncio.run(plugin.make_sampler(attached, Pool("http"), tmp_path).close())  # a run publishes its own
        if version:
            asyncio.run(plugin.make_lone_sampler(attached, Pool("http"), tmp_path).close())
            return
        with pytest.raises(
            UserError, match=rf"rollout\.addr: {servers.remotes[0].base} serves a model that is damaged: .*{NAN}"
        ):
            plugin.make_lone_sampler(attached, Pool("http"), tmp_path)
    finally:
        servers.close()


@pytest.mark.parametrize("command", ["serve", "evaluate", "rollout"])
def test_commands_without_a_learner_refuse_a_damaged_model_in_a_line(stand_in, tmp_path, command):
    model_dir = with_a_nan(make_model(tmp_path / "model"))
    flags = {
        "config": "configs/quickstart.py",
        "config.allocation_mode": "sglang:d1",
        "config.sglang.device": "cpu",
        "config.actor.init_from_scratch": False,
        "config.actor.path": model_dir,
        "config.evaluator.max_prompts": 2,
        "out": tmp_path / "out",
        "model": model_dir,
    }
    of = {"serve": ("out", "model"), "rollout": ("model",), "evaluate": ()}[command]
    flags = [f"--{name}={value}" for name, value in flags.items() if name not in of]
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", *flags], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    (line,) = [line for line in done.stderr.splitlines() if "NaN" in line]
    assert done.returncode == 1 and re.search(NAN, line) and "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_port_that_somebody_took_is_replaced_by_another(stand_in, tmp_path):
    (stand_in / "port").touch()
    servers = SglangServers(config(tmp_path), Pool("sglang"), tmp_path)
    assert "already in use" in (tmp_path / "logs" / "sglang-0.log").read_text()
    servers.close()


def test_a_start_that_fails_shows_the_end_of_the_log_and_leaves_nothing_running(stand_in, tmp_path):
    (stand_in / "broken").touch()
    before = running_children()
    with pytest.raises(UserError, match=r"(?s)status 3.*no such attention backend"):
        SglangServers(config(tmp_path), Pool("sglang", data=2), tmp_path)
    assert gone([p.pid for p in running_children() if p not in before])


@pytest.mark.parametrize(("device", "told"), [("", True), ("cuda", False)])
def test_a_machine_without_an_accelerator_is_told_which_key_does_without(stand_in, tmp_path, device, told):
    (stand_in / "alone").touch()
    with pytest.raises(UserError, match=r"No accelerator") as caught:
        SglangServers(config(tmp_path, device=device), Pool("sglang"), tmp_path)
    assert ("sglang.device=cpu" in str(caught.value).splitlines()[-1]) == told


def test_a_server_that_never_answers_is_given_up(stand_in, tmp_path):
    (stand_in / "mute").touch()
    with pytest.raises(UserError, match=r"sglang\.start_timeout"):
        SglangServers(config(tmp_path, start_timeout=1.0), Pool("sglang"), tmp_path)


def test_a_dead_server_is_started_again_until_it_has_died_too_often(stand_in, tmp_path):
    servers = SglangServers(config(tmp_path, restarts=1), Pool("sglang"), tmp_path)
    for attempt in range(2):
        server = psutil.Process(servers._processes[0].reaper.pid).children()[0]
        os.kill(server.pid, signal.SIGKILL)
        servers._processes[0].reaper.wait(10)
        assert "ended with status" in str(servers.died(0))
        if attempt == 0:
            assert servers.restart(0).base == servers._processes[0].base
            assert servers.died(0) is None
    with pytest.raises(UserError, match=r"sglang\.restarts"):
        servers.restart(0)
    servers.close()


@pytest.mark.parametrize("when", ["while the dead one is stopped", "while the new one starts"])
def test_nothing_is_started_once_the_servers_are_closed(stand_in, tmp_path, monkeypatch, when):
    """A run may end while a server is being restarted; the new process ends too."""
    before = running_children()
    servers = SglangServers(config(tmp_path), Pool("sglang"), tmp_path)
    if when == "while the new one starts":
        (stand_in / "mute").touch()
        closing = threading.Timer(1.0, servers.close)
        closing.start()
    else:
        stop = Process.stop
        monkeypatch.setattr(Process, "stop", lambda process: (stop(process), monkeypatch.undo(), servers.close()))
    with pytest.raises(UserError, match="the servers are closed"):
        servers.restart(0)
    if when == "while the new one starts":
        closing.join()
    assert gone([p.pid for p in running_children() if p not in before])


def test_servers_end_with_a_process_that_is_killed(tmp_path):
    """A killed process can't stop its servers: the reaper sees that its stdin was closed."""
    program = f"""
        import subprocess, sys, time
        sleep = "import time; time.sleep(600)"
        tree = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{sleep!r}}]); {{sleep}}"
        started = subprocess.Popen([sys.executable, {reaper.__file__!r}, "1", sys.executable, "-c", tree],
                                 stdin=subprocess.PIPE, start_new_session=True)
        print(started.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    reaping = psutil.Process(int(parent.stdout.readline()))
    end = time.monotonic() + 10
    while len(tree := reaping.children(recursive=True)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(tree) == 2
    parent.kill()
    parent.wait()
    assert gone([reaping.pid, *(process.pid for process in tree)])


def test_a_reaper_that_is_killed_takes_the_server_along(tmp_path):
    process = subprocess.Popen(
        [sys.executable, reaper.__file__, "1", sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE
    )
    end = time.monotonic() + 10
    while not (tree := psutil.Process(process.pid).children()) and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert gone([tree[0].pid])


def test_an_interpreter_without_sglang_or_none_at_all_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no SGLang"):
        installed_release(sys.executable)
    with pytest.raises(UserError, match=r"sglang\.python: no such interpreter"):
        SglangServers(config(tmp_path, python=str(tmp_path / "python")), Pool("sglang"), tmp_path)


@pytest.mark.parametrize("text", ["#!/bin/true\n", "#!/bin/sh\necho hello\n", "#!/no/such/shell\n", "\0"])
def test_what_is_no_python_is_refused_in_a_line(tmp_path, text):
    program = tmp_path / "program"
    program.write_text(text)
    program.chmod(0o755)
    with pytest.raises(
        UserError, match=r"sglang\.python: .*program (can.t be run|printed no version of SGLang)[^\n]*bin/python"
    ):
        installed_release(str(program))


def test_a_python_that_does_not_answer_is_refused(monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"no answer in 60 s"):
        installed_release(sys.executable)


def test_the_command_says_what_the_config_says():
    options = config_of(
        **{"sglang.attention_backend": "fa3", "sglang.mem_fraction_static": 0.5, "sglang.extra_args": ("--x", "1")}
    )
    command = launch_command(SglangConfig.of(options), Pool("sglang", tensor=2), Path("m"), 7, (0, 5, 17))
    pairs = dict(itertools.pairwise(command))
    assert pairs["--model-path"] == "m" and pairs["--tp-size"] == "2" and pairs["--host"] == "127.0.0.1"
    assert pairs["--weight-version"] == "0" and pairs["--mem-fraction-static"] == "0.5" and pairs["--x"] == "1"
    assert "--device" not in command and "--context-length" not in command  # SGLang decides
    assert "--incremental-streaming-output" not in command and "--enable-multimodal" not in command
    pictures = SglangConfig.of(config_of(**{"sglang.enable_multimodal": True}))
    command = launch_command(pictures, Pool("sglang"), Path("m"), 7, (0, 5, 17))
    assert {"--enable-multimodal", "--disable-fast-image-processor"} <= set(command)  # resized as by the learner
    assert "--incremental-streaming-output" in launch_command(
        SglangConfig.of(options), Pool("sglang"), Path("m"), 7, (0, 5, 23)
    )


@pytest.mark.parametrize("directory", ["runs/sglang:d1/init", "runs/plain/init"])
def test_no_model_has_a_name_with_a_colon_which_sglang_refuses(directory):
    pairs = dict(itertools.pairwise(launch_command(SglangConfig(), Pool("sglang"), Path(directory), 7, (0, 5, 23))))
    assert pairs["--model-path"] == directory and ":" not in pairs.get("--served-model-name", directory)


def test_replicas_have_devices_of_their_own():
    settings, pool = SglangConfig(), Pool("sglang", data=2, tensor=2, first_device=1)
    assert [environment(settings, pool, i, {})["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["1,2", "3,4"]
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "default"}
    assert set(environment(settings, pool, 0, torchrun | {"HOME": "/h"})) == {"HOME", "CUDA_VISIBLE_DEVICES"}
    assert environment(settings, pool, 1, {"CUDA_VISIBLE_DEVICES": "a,b,c,d,e"})["CUDA_VISIBLE_DEVICES"] == "d,e"
    with pytest.raises(UserError, match="device 4"):
        environment(settings, pool, 1, {"CUDA_VISIBLE_DEVICES": "a,b"})


def test_free_ports_are_free():
    assert len({free_port(LOOPBACK) for _ in range(5)}) > 1
