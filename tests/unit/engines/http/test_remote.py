"""Properties of servers as their answers say them, and waiting for servers that are starting."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rljax.config import io
from rljax.engine.rank import free_port
from rljax.engines.http import plugin, remote
from rljax.errors import UserError


@pytest.mark.parametrize(
    ("states", "memory"),
    [
        ([{"memory_usage": {"weight": 1.5, "kvcache": 2, "graph": 0.5, "token_capacity": 9000}}], 4 << 30),
        ([{"memory_usage": {"weight": 1, "kvcache": 2, "graph": {"decode": 0.25, "prefill": 0.75}}}], 4 << 30),
        ([{"memory_usage": {"weight": 1}}, {"memory_usage": {"weight": 2}}], 2 << 30),  # the fullest device
        ([{}], None),
        (None, None),
    ],
)
def test_what_sglang_says_of_its_memory_is_read_in_either_releases_form(states, memory):
    assert remote._memory({"internal_states": states}) == memory


class Answers(BaseHTTPRequestHandler):
    """A server of ours, as far as an attaching run asks."""

    def do_GET(self):
        body = {
            "/get_model_info": b'{"model_path": "/nowhere", "weight_version": "7"}',
            "/get_server_info": b'{"version": "rljax", "disable_overlap_schedule": true, "context_length": 64}',
        }[self.path]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_a_run_waits_for_servers_that_start_after_it(monkeypatch):
    monkeypatch.setattr(plugin, "ATTACH_INTERVAL", 0.02)
    port = free_port("127.0.0.1")

    def config(seconds):
        return io.load("quickstart", [("rollout.addr", f"127.0.0.1:{port}"), ("rollout.attach_timeout", str(seconds))])

    with pytest.raises(UserError, match="is a server running there"):
        plugin.attach(config(0))
    began = time.monotonic()
    with pytest.raises(UserError, match="is a server running there"):
        plugin.attach(config(0.2))
    assert time.monotonic() - began >= 0.2
    servers = []

    def serve():
        servers.append(HTTPServer(("127.0.0.1", port), Answers))
        servers[0].serve_forever(0.01)

    starting = threading.Timer(0.2, serve)
    starting.start()
    assert plugin.attach(config(60)).version == 7
    servers[0].shutdown()
    starting.join()
    servers[0].server_close()
