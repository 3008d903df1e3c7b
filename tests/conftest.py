"""For all tests: hypothesis has no deadline, for tests are not about the machine's load; JAX
compiles a program once; torch has a thread a test process, for several of them on a few cores wait
for each other's threads most of the time.
"""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from rljax.process.first_signals import STOP_SIGNALS

settings.register_profile("rljax", deadline=None)
settings.load_profile("rljax")

# Read when jax is imported, here and in the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# The user's token for servers (rljax/messaging/token.py): tests have one of their own
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rljax-tests-")


@pytest.fixture(autouse=True)
def stop_signals():
    """Gives stop signals back: a command run in this process would end it at the next one."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
