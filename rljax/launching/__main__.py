"""Runs one host of a job.

    python -m rljax.launching JOB.json --side=train --host=0 --head=ADDRESS

The files of `experiments.launch` call it. --host is a number, or the environment variable that has
it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rljax.errors import UserError
from rljax.launching.host import Place, run
from rljax.launching.job import MASTER_PORT, SERVER_PORT, Job


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rljax.launching", description="Runs one host of a job.")
    parser.add_argument("job", type=Path, help="job.json")
    parser.add_argument("--side", default="train", help="train or serve")
    parser.add_argument("--host", default="0", help="the host's number on its side, or the environment variable that has it")
    parser.add_argument("--head", default="127.0.0.1", help="address of the first host that trains")
    parser.add_argument("--launch", default="", help="the same on all hosts of one start")
    parser.add_argument("--servers", default="", help="addresses of the hosts that serve, with commas between")
    parser.add_argument("--port", type=int, default=MASTER_PORT, help="free port on the first host")
    parser.add_argument("--server_port", type=int, default=SERVER_PORT, help="port of each server")
    flags = parser.parse_args()
    try:
        servers = tuple(filter(None, flags.servers.split(",")))
        place = Place(_number(flags.host), flags.head, flags.launch, servers, flags.port, flags.server_port)
        status = run(Job.from_file(flags.job), flags.side, place)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


def _number(text: str) -> int:
    value = text if text.isdecimal() else os.environ.get(text, "")
    if not value.isdecimal():
        raise UserError(f"--host: {text!r} is no number, nor an environment variable that has one")
    return int(value)


if __name__ == "__main__":
    main()
