"""Reward functions that behave badly, for the pool's tests. `completion` says what to do."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def fails(prompt, completion):
    raise LookupError(completion)


def act(prompt, completion):
    word, _, argument = completion.partition(" ")
    if word == "value":
        return float(argument)
    if word == "parts":
        return {"reward": 1.5, "right": 1.0, "format": 0.5}
    if word == "no_total":
        return {"right": 1.0}
    if word == "nan":
        return float("nan")
    if word == "none":
        return None
    if word == "raise":
        raise LookupError(argument)
    if word == "exit":
        sys.exit(0)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "after":  # seconds
        time.sleep(float(argument))
        return 2.0
    if word == "hang":
        while True:
            time.sleep(0.01)
    if word == "hang_in_c":  # holds the interpreter: no other Python thread of the process runs
        ctypes.PyDLL(None).sleep(3600)
    if word == "spawn":  # a child that outlives the call, then no end
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(argument).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(3600)
    if word == "fork":  # a daemon in a session of its own, with all that is open here; then dies
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(argument).write_text(str(os.getpid()))
                time.sleep(3600)
            os._exit(0)
        while not Path(argument).exists() or not Path(argument).read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "many":  # components
        return {"reward": 1.0} | {f"component {i}": 0.0 for i in range(int(argument))}
    if word == "pid":
        return float(os.getpid())
    if word == "print":
        print('{"id": 1, "reward": 100.0, "components": {}}', flush=True)
        return 1.0
    if word == "input":
        return float(len(sys.stdin.read()))
    if word == "allocate":
        return float(len(bytearray(int(argument) << 20)))
    if word == "modules":
        return float(any(name in sys.modules for name in ("jax", "torch", "transformers", "grain")))
    if word == "uid":
        return {"reward": 0.0, "index": float(prompt.uid.partition("/")[2]), "field": float(prompt.fields["answer"])}
    if word == "flaky":  # fails the first time only
        marker = Path(argument)
        if marker.exists():
            return 1.0
        marker.touch()
        raise ConnectionError("the first time")
    raise AssertionError(completion)


async def act_async(prompt, completion):
    word, _, argument = completion.partition(" ")
    if word == "meet":  # waits for that many calls, which can only come while it waits
        meeting.append(prompt)
        while len(meeting) < int(argument):
            await asyncio.sleep(0.01)
        return 1.0
    if word == "sleep":
        await asyncio.sleep(float(argument))
        return 1.0
    if word == "block":  # forgets to await
        time.sleep(float(argument))
        return 1.0
    if word == "own_timeout":
        raise TimeoutError("a judge did not answer")
    if word == "pid":
        return float(os.getpid())
    raise AssertionError(completion)


not_callable = 3
meeting = []


def digits(prompt, completion):
    """Returns the share of digits among five characters."""
    return sum(character.isdigit() for character in completion) / 5
