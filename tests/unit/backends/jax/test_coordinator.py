"""JAX's coordinator of processes on one host listens on loopback alone; JAX by itself takes all interfaces.
A process joins others once: a second time is refused in one line, where JAX's others would wait.
"""

import json
import os
import subprocess
import sys

CODE = """
import json
import jax
import psutil
from rljax.backends.jax import multihost
from rljax.engine.rank import free_port
from rljax.errors import UserError

def join():
    multihost.join(f"127.0.0.1:{free_port('127.0.0.1')}", 1, 0)

join()
listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
print(json.dumps(listening))
for leaves in (lambda: None, multihost.leave):
    jax.devices()
    leaves()
    try:
        join()
    except UserError as error:
        print(error)
"""


def test_the_coordinator_listens_on_loopback_alone():
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, *refused = done.stdout.splitlines()
    listening = json.loads(first)
    assert listening and all(address.removeprefix("::ffff:") == "127.0.0.1" for address in listening)
    assert len(refused) == 2 and all("joins a process to others once" in line for line in refused), refused
