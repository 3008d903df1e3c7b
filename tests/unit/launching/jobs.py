"""Jobs that the tests of this folder share, and a package that stands in for the run's own."""

from pathlib import Path

from rljax.config import io
from rljax.launching.hosts import Hosts, parse
from rljax.launching.job import Job, Where, job_of


def config_of(mode: str, **keys: object):
    """Returns the quickstart's config with a model whose shape is not known here."""
    elsewhere = [("actor.init_from_scratch", "False"), ("actor.path", "model")]
    changes = [("allocation_mode", mode), *elsewhere, *((key.replace("__", "."), str(value)) for key, value in keys.items())]
    return io.resolve(io.load("quickstart", changes))


def made(mode: str, topology: str, per_host: int | None = None, *, where: dict | None = None, **keys: object) -> Job:
    """Returns the job of the quickstart with another allocation_mode, and other keys."""
    hosts = Hosts.of(parse(topology), per_host)
    given = {"workdir": "/data/run", "directory": "/data/code", "arguments": ["--config=quickstart"]}
    return job_of(config_of(mode, **keys), Where(hosts=hosts, **(given | (where or {}))))


# A program that records how it was started, and then ends as FILE.does says: a status, or the signal that it waits for.
STAND_IN = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["RECORDS"])
stopped = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: stopped.append(number))
name = f"{sys.argv[1]}-{os.environ.get('RANK', '0')}"
record = {"argv": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd()}
with (here / f"{name}.jsonl").open("a") as file:
    file.write(json.dumps(record) + chr(10))
does = here / f"{name}.does"
behavior = does.read_text() if does.exists() else "0"
while behavior == "wait" and not stopped:
    time.sleep(0.02)
time.sleep(0.2 if stopped else 0)  # for a second signal
(here / f"{name}.signals").write_text(" ".join(map(str, stopped)))
sys.exit(0 if behavior == "wait" else int(behavior))
"""


def stand_in(directory: Path) -> Path:
    """Writes a package `rljax` which `python -m rljax` in that directory finds before the real one."""
    package = directory / "rljax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(STAND_IN)
    return directory
