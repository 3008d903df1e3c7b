"""Main program of a reward process: one JSON object per line in, one per line out.

    {"id": 7, "prompt": {...}, "samples": [["46", null]]}
    ->  {"id": 7, "scores": [{"reward": 1.0, "components": {"exact": 1.0}}]}
    or  {"id": 7, "error": "ValueError: ...", "place": "my_rewards.py:12", "traceback": "..."}
    or  {"id": 7, "timeout": true}        (async functions)
    {"id": 8, "check": [{...}, ...]}      prompts, before the run starts
    ->  {"id": 8, "faults": {"3": ["exact reads the field 'answer', ...", true]}}

A score is null for a sample that is rejected. It ends with its input. The first line in has the
rewards that only the parent's program has (rljax/config/registry.py), or is empty. The first line
out is {"ready": {...}}, what the rewards read, or {"refused": "why"}; imports are over by then. The
process imports neither jax nor torch. Plain functions have the process for themselves, and a call
that does not end is killed with it. Where all rewards are async, calls run side by side and are
cancelled one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from rljax.config import registry
from rljax.errors import Rejected, UserError
from rljax.process import frames
from rljax.process.parent import die_with
from rljax.rewards.score import LIBRARIES, Sampled, Score, score_of, weighted
from rljax.rewards.shapes import Call, Fault, Reward, Sample, find_rewards
from rljax.types import Prompt

MAX_ANSWER = 1 << 20  # bytes of an answer: a score and its components

_REJECTED = object()  # in place of what a call that raised Rejected returns


def main(names: Sequence[str], weights: Sequence[float], memory_mb: int, timeout: float, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    die_with(parent)
    jobs, answers = _take_over_pipes()
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    try:
        if packed := jobs.readline().strip():
            registry.unpack(packed.decode())
        scorer = Scorer(find_rewards(names), weights or [1.0] * len(names))
    except UserError as error:
        return _say(answers, {"refused": str(error)})
    _import_libraries()
    _say(answers, {"ready": scorer.facts()})
    if scorer.is_async:
        asyncio.run(_serve_async(scorer, jobs, answers, timeout))
        return None
    loop = asyncio.new_event_loop()  # one for all calls, for clients that async rewards keep
    for line in iter(jobs.readline, b""):
        job = json.loads(line)
        _say(answers, {"id": job["id"], **_answer(scorer, loop, job)})
    return None


class Scorer:
    """Scores completions by one or several rewards."""

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float]) -> None:
        self._rewards = rewards
        self._weights = weights
        self.is_async = all(reward.is_async for reward in rewards)

    def facts(self) -> dict[str, bool]:
        """Returns what the pool needs to know."""
        return {
            "async": self.is_async,
            "at_once": any(reward.shape.at_once for reward in self._rewards),
            "reads_ids": any(reward.reads_ids for reward in self._rewards),
            "checks": any(reward.reads or reward.check is not None for reward in self._rewards),
        }

    def faults(self, prompts: Sequence[dict[str, Any]]) -> dict[int, Fault]:
        """Returns why prompts can't be scored, by index; prompts without a fault are left out."""
        found = {}
        for index, prompt in enumerate(map(_prompt, prompts)):
            if fault := next(filter(None, (reward.fault(prompt) for reward in self._rewards)), None):
                found[index] = fault
        return found

    async def scores(self, job: dict[str, Any]) -> list[Score | None]:
        """Scores the samples of a job; None for one to which no reward applies."""
        prompt = _prompt(job["prompt"])
        samples = [Sample(text, sampled and Sampled(**sampled)) for text, sampled in job["samples"]]
        plain = {i: _call_plain(r, prompt, samples) for i, r in enumerate(self._rewards) if not r.is_async}
        others = [i for i in range(len(self._rewards)) if i not in plain]
        awaited = await asyncio.gather(*(_call_async(self._rewards[i], prompt, samples) for i in others))
        by_reward = plain | dict(zip(others, awaited, strict=True))
        names = [reward.name for reward in self._rewards]
        return [
            weighted(names, self._weights, [by_reward[i][sample] for i in range(len(names))]) for sample in range(len(samples))
        ]


def _call_plain(reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> list[Score | None]:
    def called(call: Call) -> Any:
        try:
            return _not_awaitable(reward, reward.function(*call.args, **call.keywords))
        except Rejected:
            return _REJECTED

    return _scores(reward, list(map(called, reward.calls(prompt, samples))), len(samples))


async def _call_async(reward: Reward, prompt: Prompt, samples: Sequence[Sample]) -> list[Score | None]:
    async def called(call: Call) -> Any:
        try:
            return _not_awaitable(reward, await reward.function(*call.args, **call.keywords))
        except Rejected:
            return _REJECTED

    returned = await asyncio.gather(*map(called, reward.calls(prompt, samples)))
    return _scores(reward, returned, len(samples))


def _not_awaitable(reward: Reward, returned: Any) -> Any:
    """Returns what a reward returned. Raises ValueError for a coroutine, which nobody awaits."""
    if inspect.iscoroutine(returned):
        returned.close()  # else Python warns of it
        raise ValueError(f"{reward.name} returned a coroutine, not a number (make it `async def`, and await there)")
    return returned


def _scores(reward: Reward, returned: Sequence[Any], count: int) -> list[Score | None]:
    if not reward.shape.at_once:
        return [None if value is _REJECTED else score_of(value) for value in returned]
    (values,) = returned
    if values is _REJECTED:
        return [None] * count
    if not hasattr(values, "__len__") or len(values) != count:
        raise ValueError(f"{reward.name} returned {values!r:.100}, not a list of {count} rewards")
    return [None if value is None else score_of(value) for value in values]


class _Fields(dict[str, Any]):
    """Fields of a record. A missing one is an error that says which there are."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"no field {name!r} (the record has: {', '.join(self) or 'none'})")


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(**values | {"messages": tuple(values["messages"]), "fields": _Fields(values["fields"])})


def _answer(scorer: Scorer, loop: asyncio.AbstractEventLoop, job: dict[str, Any]) -> dict[str, Any]:
    try:
        if "check" in job:
            return {"faults": scorer.faults(job["check"])}
        return _encoded(loop.run_until_complete(scorer.scores(job)))
    except BaseException as error:  # SystemExit of user code must not end the process silently
        return _failure(error)


def _encoded(scores: Sequence[Score | None]) -> dict[str, Any]:
    return {"scores": [score and {"reward": score.reward, "components": dict(score.components)} for score in scores]}


async def _serve_async(scorer: Scorer, jobs: BinaryIO, answers: BinaryIO, timeout: float) -> None:
    async def run(job: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(timeout * len(job.get("samples", "1"))) as limit:
                answer = {"faults": scorer.faults(job["check"])} if "check" in job else _encoded(await scorer.scores(job))
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
    answer = {"error": f"{type(error).__name__}: {reason}"[:2000], "traceback": frames.shown(error)[-8000:]}
    return answer | {"place": frames.place_of(error)}


def _import_libraries() -> None:
    """Imports what the rewards of rljax that are in use need, before the clock of a call runs.

    One that can't be imported is an error of the call.
    """
    for module in LIBRARIES.keys() & sys.modules.keys():
        with contextlib.suppress(Exception):
            importlib.import_module(LIBRARIES[module])


def _say(answers: BinaryIO, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode()
    if len(line) > MAX_ANSWER and "id" in message:
        reason = f"what the reward returned takes {len(line)} bytes, and {MAX_ANSWER} are allowed (fewer components)"
        line = json.dumps({"id": message["id"], "error": f"ValueError: {reason}", "place": "", "traceback": ""}).encode()
    answers.write(line + b"\n")
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
