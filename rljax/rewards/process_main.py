"""Main program of a reward process: one JSON object per line in, one per line out.

    {"id": 7, "prompt": {...}, "completion": "46"}
    ->  {"id": 7, "reward": 1.0, "components": {"exact": 1.0}}
    or  {"id": 7, "error": "ValueError: ...", "traceback": "..."}
    or  {"id": 7, "timeout": true}        (async functions)

It ends with its input. The first line out is {"ready": true, "async": false} or {"refused": "why"}.
The process imports neither jax nor torch. A plain function has the process for itself, and a call
that does not end is killed with it. Calls of an async function run side by side and are cancelled
one by one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import traceback
from typing import Any, BinaryIO

from rljax.config import registry
from rljax.errors import UserError
from rljax.process.parent import die_with
from rljax.rewards.score import REWARDS, score_of
from rljax.types import Prompt


def main(name: str, memory_mb: int, timeout: float, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    die_with(parent)
    jobs, answers = _take_over_pipes()
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    try:
        function = registry.resolve("reward.name", name, REWARDS, "reward", ("prompt", "completion"))
    except UserError as error:
        return _say(answers, {"refused": str(error)})
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    _say(answers, {"ready": True, "async": is_async})
    if is_async:
        asyncio.run(_serve_async(function, jobs, answers, timeout))
        return None
    for line in iter(jobs.readline, b""):
        job = json.loads(line)
        _say(answers, {"id": job["id"], **_answer(function, job)})
    return None


def _answer(function: Any, job: dict[str, Any]) -> dict[str, Any]:
    try:
        score = score_of(function(Prompt(**job["prompt"]), job["completion"]))
    except BaseException as error:  # SystemExit of user code must not end the process silently
        return _failure(error)
    return {"reward": score.reward, "components": dict(score.components)}


async def _serve_async(function: Any, jobs: BinaryIO, answers: BinaryIO, timeout: float) -> None:
    async def run(job: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(timeout) as limit:
                score = score_of(await function(Prompt(**job["prompt"]), job["completion"]))
            answer = {"reward": score.reward, "components": dict(score.components)}
        except BaseException as error:  # as above
            answer = {"timeout": True} if limit.expired() else _failure(error)
        _say(answers, {"id": job["id"], **answer})

    running: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(jobs.readline):
        task = asyncio.create_task(run(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # the parent is gone or has closed the pool: nobody waits for running calls


def _failure(error: BaseException) -> dict[str, Any]:
    reason = " ".join(str(error).split())
    return {"error": f"{type(error).__name__}: {reason}"[:2000], "traceback": traceback.format_exc()[-8000:]}


def _say(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Takes stdin and stdout for the protocol alone.

    Output of user code goes to stderr, and its stdin is empty.
    """
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return jobs, answers
