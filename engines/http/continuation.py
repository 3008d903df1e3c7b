"""A completion made of several replies: the request for the rest, and the replies joined."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from rljax.engines.http.remote import Remote
from rljax.engines.http.replies import Reply
from rljax.errors import PromptTooLong, UserError
from rljax.types import Completion, Finish, Request


def remaining(request: Request, done: Completion) -> Request | None:
    """Returns the request for the rest of a completion, or None if nothing is left to sample.

    A stop string is matched within one reply only. So as many tokens are dropped, and sampled
    again, as the beginning of a stop string may span. The seed changes, or the random numbers of
    the first tokens would be used twice.
    """
    kept = len(shortened(done, request).token_ids)
    if not kept:
        return request
    left = request.params.max_new_tokens - kept
    if left <= 0:
        return None
    params = dataclasses.replace(
        request.params, max_new_tokens=left, min_new_tokens=max(0, request.params.min_new_tokens - kept)
    )
    prompt = np.concatenate([request.prompt_ids, done.token_ids[:kept]])
    seed = int.from_bytes(hashlib.blake2b(f"{request.seed}/{kept}".encode(), digest_size=4).digest(), "big") % 2**31
    return Request(request.id, prompt, params, seed)


def shortened(done: Completion, request: Request) -> Completion:
    """Drops the last tokens, in which a stop string may have begun (a token has at least one byte).

    With pictures all are dropped: SGLang makes text of a prompt with pictures and encodes it again,
    which may give other ids for sampled tokens.
    """
    if request.pictures:
        return Completion(done.token_ids[:0], done.logp[:0], done.versions[:0], done.finish)
    drop = max((len(stop.encode()) for stop in request.params.stop), default=1) - 1
    kept = max(0, len(done.token_ids) - drop)
    return Completion(done.token_ids[:kept], done.logp[:kept], done.versions[:kept], done.finish)


def fitted(request: Request | None, remote: Remote, sampled: int) -> Request | None:
    """Limits a request to the server's context; None if no room is left after `sampled` tokens.

    Raises UserError for an id outside the vocabulary, and PromptTooLong for a prompt that fills the
    context.
    """
    if request is None:
        return None
    prompt, vocabulary, context = request.prompt_ids, remote.info.vocabulary, remote.info.context_length
    if vocabulary is not None and (np.min(prompt) < 0 or np.max(prompt) >= vocabulary):
        raise UserError(f"request {request.id}: the prompt has a token id outside the vocabulary [0, {vocabulary})")
    if context is None:
        return request
    room = context - len(prompt)
    if room <= 0 and sampled:
        return None
    if room <= 0:
        raise PromptTooLong(f"request {request.id}: a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    params = request.params
    if params.max_new_tokens <= room:
        return request
    params = dataclasses.replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
    return dataclasses.replace(request, params=params)


def joined(done: Completion, reply: Reply) -> Completion:
    token_ids, logp, versions = reply.arrays()
    return Completion(
        np.concatenate([done.token_ids, token_ids]),
        np.concatenate([done.logp, logp]),
        np.concatenate([done.versions, versions]),
        reply.finish or Finish.ABORT,
    )
