"""JAX's coordinator of processes on one host listens on loopback alone; JAX by itself takes all interfaces."""

import json
import os
import subprocess
import sys

CODE = """
import json
import psutil
from rljax.backends.jax import multihost
from rljax.engine.rank import free_port
multihost.join(f"127.0.0.1:{free_port('127.0.0.1')}", 1, 0)
listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
print(json.dumps(listening))
"""


def test_the_coordinator_listens_on_loopback_alone():
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    listening = json.loads(done.stdout.splitlines()[-1])
    assert listening and all(address.removeprefix("::ffff:") == "127.0.0.1" for address in listening)
