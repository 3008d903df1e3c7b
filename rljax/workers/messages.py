"""Requests and groups as the fields and bytes of messages, there and back (rljax/workers/connection.py)."""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.errors import EpisodeError, error_of
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import NEVER, Ticket, oldest_version
from rljax.rollout.journal import pack, unpack
from rljax.rollout.result import Failure, Result
from rljax.types import Completion, Finish, Request, SamplingParams
from rljax.workers.connection import Message

Packed = tuple[dict[str, Any], bytes]


def done(ticket: Ticket, result: Result) -> tuple[dict[str, Any], bytes]:
    """The message of a group that is finished, less what was measured."""
    trajectories, body = pack(result.trajectories)
    fields = {
        "index": ticket.index,
        "attempt": ticket.attempt,
        "wanted": result.wanted,
        "trajectories": trajectories,
        "failures": [_described(failure) for failure in result.failures],
    }
    return fields, body


def _described(failure: Failure) -> dict[str, str]:
    error = failure.error
    ours = type(error).__module__ == "rljax.errors"  # its kind says its name
    text = " ".join((str(error) if ours else f"{type(error).__name__}: {error}").split())
    trace = "".join(traceback.format_exception(error))[-8000:]
    return {"kind": failure.kind, "error": text[:2000], "traceback": trace}


def result_of(message: Message) -> Result:
    """Of a `done`. Raises ValueError, KeyError, TypeError for what a learner could not be given."""
    trajectories = unpack(message.fields["trajectories"], message.body)
    failures = tuple(_failure(entry) for entry in message.fields["failures"])
    wanted = message.fields["wanted"] is True
    for t in trajectories:
        numbers = (t.reward, *t.components.values())
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise ValueError("a reward that is no number")
        if t.token_ids.min(initial=0) < 0 or not np.isfinite(t.behavior_logp[t.loss_mask]).all():
            raise ValueError("a token id below 0, or a log-prob that is no number")
        if (t.versions[t.loss_mask] < 0).any():
            raise ValueError("tokens to be trained on that no policy sampled")
    if wanted and oldest_version(trajectories) == NEVER:
        raise ValueError("a group without a token to train on")
    return Result(trajectories, failures, wanted)


def measured_of(message: Message) -> tuple[dict[str, Mean], dict[str, float]]:
    """What a worker measured and counted: of a `done`. Raises ValueError, KeyError, TypeError, AttributeError."""
    means = {name: Mean(*map(float, mean)) for name, mean in message.fields["measured"].items()}
    return means, {name: float(count) for name, count in message.fields["counts"].items()}


def _failure(entry: Mapping[str, str]) -> Failure:
    error: EpisodeError = error_of(entry["kind"], entry["error"])
    error.add_note(entry["traceback"])
    return Failure(error.kind, error)


def request_of(message: Message) -> Request:
    fields = message.fields
    params = fields["params"]
    listed = {name: tuple(params[name]) for name in ("stop", "stop_token_ids")}
    return Request(fields["request"], np.frombuffer(message.body, "<i4"), SamplingParams(**params | listed), fields["seed"])


def asked(request: Request) -> Packed:
    """The message of a request."""
    fields = {"request": request.id, "params": dataclasses.asdict(request.params), "seed": int(request.seed)}
    return fields, np.ascontiguousarray(request.prompt_ids, "<i4").tobytes()


def completed(completion: Completion) -> Packed:
    """The message of a completion."""
    arrays = (completion.token_ids.astype("<i4"), completion.logp.astype("<f4"), completion.versions.astype("<i4"))
    fields = {"finish": completion.finish.value, "tokens": len(completion.token_ids)}
    return fields, b"".join(array.tobytes() for array in arrays)


def completion_of(message: Message) -> Completion:
    """Of what `completed` made."""
    n, body = message.fields["tokens"], message.body
    ids, logp, versions = (np.frombuffer(body, dtype, n, 4 * n * at) for at, dtype in enumerate(("<i4", "<f4", "<i4")))
    return Completion(ids, logp, versions, Finish(message.fields["finish"]))
