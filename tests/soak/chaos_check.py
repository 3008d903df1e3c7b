"""Checks what a chaos run left behind. It imports nothing of the project.

    python tests/soak/chaos_check.py DIRECTORY

Prints a line per violation; exit status 1 if there is any. DIRECTORY has

    settings.json    {"epochs", "prompts", "lag", "batch", "samples": per prompt, "unproved":
                     {"trainer", "server": strangers that its door takes at once}}
    ledger.jsonl     {"step", "uids", "lag"} per step that was trained; of a step that was made
                     again after a kill the last line counts
    endings.jsonl    {"code", "killed", "disk_full", "status": what status.json said} per trainer
    samples.jsonl    {"name", "pid", "files", "strangers", "bytes"} per process and second; files
                     without strangers, which are connections of the chaos run's own
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

BYTES = 24 << 20  # growth allowed
FILES = 8  # growth allowed beside connections: a journal, logs, a file under way
STARTING = 5  # samples in which a process is not complete
LONG = 30  # samples of a process; of fewer, halves say little


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_ledger(settings, ledger):
    last = {line["step"]: line for line in ledger}
    steps = -(-settings["epochs"] * settings["prompts"] // settings["batch"])
    if sorted(last) != list(range(1, steps + 1)):
        yield f"steps {min(last, default=0)} to {max(last, default=0)}, {len(last)} of them, and not {steps}"
    trained = Counter(uid for line in last.values() for uid in line["uids"])
    wanted = {f"{epoch}/{index}" for epoch in range(settings["epochs"]) for index in range(settings["prompts"])}
    for uid in sorted(wanted - trained.keys()):
        yield f"prompt {uid} is lost"
    for uid in sorted(trained.keys() - wanted):
        yield f"prompt {uid} does not exist"
    for uid, times in sorted(trained.items()):
        if times > 1:
            yield f"prompt {uid} was trained on in {times} steps"
    for line in ledger:
        if not 0 <= line["lag"] <= settings["lag"]:
            yield f"a token of step {line['step']} was {line['lag']} versions old"


def of_endings(endings):
    if not endings or endings[-1]["code"] != 0:
        yield "the run never finished"
    for number, ending in enumerate(endings):
        status = ending["status"] or {}
        where = f"ending {number} (exit status {ending['code']})"
        if ending["killed"]:
            if status.get("state") not in ("running", "failed", "finished"):
                yield f"{where}: killed, and status.json says {status.get('state')!r}"
        elif ending["code"] == 0:
            if status.get("state") != "finished":
                yield f"{where}: status.json says {status.get('state')!r}"
        elif (status.get("state") != "failed" or not status.get("error")) and not ending["disk_full"]:
            yield f"{where}: no reason in status.json: {json.dumps(status)}"  # a full disk has no room for one


def of_samples(settings, samples):
    """Least files of a process are those it has while it rests: what leaks stays in them, and what
    comes and goes does not, beyond a connection per request that is always under way.
    """
    requests = (settings["lag"] + 1) * settings["batch"] * settings["samples"]
    by_process = defaultdict(list)
    for sample in samples:
        by_process[sample["name"], sample["pid"]].append(sample)
    for (name, pid), found in by_process.items():
        where, strangers = f"{name} (process {pid})", max(s["strangers"] for s in found)
        most = settings["unproved"].get(name.split()[0], 0)  # a worker has no door
        if strangers > most:
            yield f"{where} had {strangers} connections of strangers, and not {most} at most"
        if len(found) < LONG:
            continue
        halves = found[STARTING : len(found) // 2], found[len(found) // 2 :]
        for what, least_or_most, bound in (("files", min, FILES + requests), ("bytes", max, BYTES)):
            first, second = (least_or_most(s[what] for s in half) for half in halves)
            if second - first > bound:
                yield f"{where} has {second - first} more {what} in its second half, of {len(found)} s"


def violations(directory):
    settings = json.loads((directory / "settings.json").read_text())
    yield from of_ledger(settings, lines(directory / "ledger.jsonl"))
    yield from of_endings(lines(directory / "endings.jsonl"))
    yield from of_samples(settings, lines(directory / "samples.jsonl"))


if __name__ == "__main__":
    found = list(violations(Path(sys.argv[1])))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)
