"""For all tests: hypothesis has no deadline, for tests are not about the machine's load; JAX compiles a program once."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("rljax", deadline=None)
settings.load_profile("rljax")

# Read when jax is imported, here and in the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
