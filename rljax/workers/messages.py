"""Messages between a trainer and its workers.

from the trainer    config {config}                          the resolved config, first of all
                    lease {ticket}                           a prompt to work on
                    revoke {}                                all leases so far are void
                    completion {id} or {id, error, kind}     the answer to a `generate`
                    file {name}, files_complete {version}    a tokenizer, then weights (files.py)
                    end {}                                   the run is over
from the worker     group {index, attempt, ...}              a finished group
                    generate {id, ...}, cancel {id}          a request for the trainer's sampler
                    revoked {}                               nothing of void leases follows
                    trace {pid, events}                      what it did, where the run is traced
from both           heartbeat {}
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rljax import tracing
from rljax.errors import EpisodeError, RequestLost, SamplerError, UserError, error_of
from rljax.messaging.framing import Message
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import NEVER, Ticket, oldest_version
from rljax.rollout.journal import pack, unpack
from rljax.rollout.result import Failure, Result
from rljax.rollout.trajectories import with_numbers
from rljax.tracing import Event
from rljax.types import Completion, Finish, Request, SamplingParams

SAMPLER_ERRORS: dict[str, type[Exception]] = {
    "refused": UserError,
    "given_up": RequestLost,
    "lost": SamplerError,
}  # subclasses before their base classes


# Groups -----------------------------------------------------------------------------------------------------------------


def encode_group(ticket: Ticket, result: Result, means: Mapping[str, Mean], counts: Mapping[str, int]) -> Message:
    """Encodes the result of a prompt.

    Args:
      means, counts: metrics of the worker since its last group.
    """
    entries, arrays = pack(result.trajectories)
    fields = {
        "index": ticket.index,
        "attempt": ticket.attempt,
        "wanted": result.wanted,
        "trajectories": entries,
        "failures": [_encode_failure(failure) for failure in result.failures],
        "means": {name: dataclasses.astuple(mean) for name, mean in means.items()},
        "counts": dict(counts),
    }
    return Message("group", fields, arrays)


def _encode_failure(failure: Failure) -> dict[str, str]:
    error = failure.error
    is_own = type(error).__module__ == "rljax.errors"  # the kind says its type
    text = " ".join((str(error) if is_own else f"{type(error).__name__}: {error}").split())
    trace = "".join(traceback.format_exception(error))[-8000:]
    return {"kind": failure.kind, "error": text[:2000], "traceback": trace}


def decode_group(message: Message) -> Result:
    """Decodes the result of a prompt.

    Raises:
      ValueError, KeyError, TypeError: the message is malformed, or a learner can't train on it.
    """
    trajectories = unpack(message.fields["trajectories"], message.arrays)
    failures = tuple(_decode_failure(entry) for entry in message.fields["failures"])
    wanted = message.fields["wanted"] is True
    for t in trajectories:
        with_numbers(t)
        if t.token_ids.min(initial=0) < 0 or not np.isfinite(t.behavior_logp[t.loss_mask]).all():
            raise ValueError("a token id is below 0, or a log-prob is not finite")
        if (t.versions[t.loss_mask] < 0).any():
            raise ValueError("tokens to train on have no version: the policy did not sample them")
    if wanted and oldest_version(trajectories) == NEVER:
        raise ValueError("the group has no token to train on")
    return Result(trajectories, failures, wanted)


def _decode_failure(entry: Mapping[str, str]) -> Failure:
    error: EpisodeError = error_of(entry["kind"], entry["error"])
    error.add_note(entry["traceback"])
    return Failure(error.kind, error)


def decode_measurements(message: Message) -> tuple[dict[str, Mean], dict[str, float]]:
    """Decodes the means and counts in a `group` message.

    Raises:
      ValueError, KeyError, TypeError, AttributeError: the message is malformed.
    """
    means = {name: Mean(*map(float, mean)) for name, mean in message.fields["means"].items()}
    return means, {name: float(count) for name, count in message.fields["counts"].items()}


# Requests ---------------------------------------------------------------------------------------------------------------


def encode_request(number: int, request: Request) -> Message:
    """Encodes a request for the trainer's sampler, with a number that its answer carries too."""
    fields = {"id": number, "request": request.id, "params": dataclasses.asdict(request.params), "seed": int(request.seed)}
    arrays = {"prompt_ids": np.asarray(request.prompt_ids, "<i4")}
    if request.pictures:
        fields |= {"pictures": list(request.pictures), "marked_text": request.marked_text}
    return Message("generate", fields, arrays)


def decode_request(message: Message) -> tuple[int, Request]:
    """Decodes a request and its number; the inverse of `encode_request`.

    Raises:
      ValueError, KeyError, TypeError: the message is malformed.
    """
    fields = message.fields
    params = fields["params"]
    listed = {name: tuple(params[name]) for name in ("stop", "stop_token_ids")}
    prompt_ids = _vector(message, "prompt_ids", "<i4")
    pictures: dict[str, Any] = {}
    if "pictures" in fields:
        pictures = {"pictures": tuple(map(str, fields["pictures"])), "marked_text": str(fields["marked_text"])}
    params = SamplingParams(**params | listed)
    return int(fields["id"]), Request(fields["request"], prompt_ids, params, fields["seed"], **pictures)


def encode_completion(number: int, completion: Completion) -> Message:
    """Encodes the answer to the request with this number."""
    arrays = {
        "token_ids": completion.token_ids.astype("<i4"),
        "logp": completion.logp.astype("<f4"),
        "versions": completion.versions.astype("<i4"),
    }
    return Message("completion", {"id": number, "finish": completion.finish.value}, arrays)


def encode_sampler_error(number: int, error: Exception) -> Message:
    """Encodes the error that is the answer to the request with this number."""
    kind = next(kind for kind, error_type in SAMPLER_ERRORS.items() if isinstance(error, error_type))
    return Message("completion", {"id": number, "error": str(error), "kind": kind})


def decode_completion(message: Message) -> Completion | Exception:
    """Decodes the answer to a request: the completion, or the sampler's error.

    Raises:
      ValueError, KeyError, TypeError: the message is malformed.
    """
    if "error" in message.fields:
        return SAMPLER_ERRORS[message.fields["kind"]](message.fields["error"])
    ids, logp, versions = (_vector(message, *array) for array in (("token_ids", "<i4"), ("logp", "<f4"), ("versions", "<i4")))
    if not len(ids) == len(logp) == len(versions):
        raise ValueError("arrays of different lengths")
    return Completion(ids, logp, versions, Finish(message.fields["finish"]))


def _vector(message: Message, name: str, dtype: str) -> np.ndarray[Any, Any]:
    array = message.arrays[name]
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} of {array.dtype}, {array.shape}")
    return array


# Traces -----------------------------------------------------------------------------------------------------------------


def encode_trace(pid: int, events: Iterable[Event]) -> Message:
    """Encodes events of a worker's trace."""
    return Message("trace", {"pid": pid, "events": tracing.to_text(events)})


def decode_trace(message: Message) -> tuple[int, list[Event]]:
    """Decodes a worker's process id and events.

    Raises:
      ValueError, KeyError, TypeError: the message is malformed.
    """
    return int(message.fields["pid"]), tracing.from_text(message.fields["events"])
