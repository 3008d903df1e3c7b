"""Runs a follower on the leader's host: `python -m rljax.multiprocess WORKDIR`.

Its rank is in the environment (rljax/engine/rank.py).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from rljax.engine.rank import from_environment
from rljax.errors import UserError
from rljax.multiprocess.follower import follow


def main() -> None:
    parent = os.getppid()

    def orphan() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=orphan, daemon=True, name="orphan").start()
    try:
        follow(from_environment(), Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
