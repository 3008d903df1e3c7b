"""The JSON of SGLang's native protocol: bodies of /generate and their replies.

    client                                          server
    generate_body(request) -> {...}   -- HTTP -->   parse_generate({...}) -> ParsedRequest
    replies.Reply.add({...})          <-- SSE --    reply({...}) of the tokens so far

Covers only what rljax needs: one prompt of token ids (or of text, if the server has a tokenizer)
and one completion per request.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rljax.config.registry import nearest
from rljax.types import Finish, Request, SamplingParams

GREEDY_TEMPERATURE = 0.0  # SGLang's value for argmax
NO_TOP_K = -1
MAX_SEED = 2**63
_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # written as an escape or, against UTF-8, as bytes
MAX_STOPS = 32  # stop strings, as in SGLang
MAX_STOP_LENGTH = 1024  # characters per stop string

# Keys of sampling_params that we don't support, and the value at which each changes nothing.
NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "beam_width": None,
    "watermark": None,
    "spaces_between_special_tokens": True,
}
# Keys of the body that we don't support, and the values at which each changes nothing.
NEUTRAL_KEYS: Mapping[str, tuple[Any, ...]] = {
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "input_embeds": (),
}
# Keys that change only what is logged, in which order requests run or how often chunks are sent.
INDIFFERENT_KEYS = frozenset({"extra_key", "log_metrics", "priority", "data_parallel_rank", "routed_dp_rank"})
INDIFFERENT = frozenset({"stream_interval"})
MAX_TEXT = 4_000_000  # characters of a prompt of text


class BadRequest(Exception):
    """A malformed request body; the message names the field. Answered with status 400."""


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """The body of a /generate request, parsed and checked."""

    request: Request
    stream: bool
    return_logprob: bool
    incremental: bool  # a chunk has only its new tokens; SGLang's default: all tokens so far
    skip_special_tokens: bool = True  # in the text
    stop_trim: bool = True  # the text ends before the stop string, or the stop id, that ended it


# Requests, from our client ------------------------------------------------------------------------------------------------


def generate_body(
    request: Request, *, cache_key: str, incremental: bool = False, interval: int | None = None
) -> dict[str, Any]:
    """Returns the body of /generate for a request, streamed and with log-probs.

    Args:
      cache_key: requests share cached prefixes only under the same key; it must change with the
        weights (no stale cache).
      incremental: ask our own server for chunks that hold new tokens only.
      interval: tokens per chunk, for servers that accept it per request.
    """
    params = request.params
    sampling = {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "temperature": GREEDY_TEMPERATURE if params.greedy else params.temperature,
        "top_p": 1.0 if params.greedy else params.top_p,
        "top_k": NO_TOP_K if params.greedy or not params.top_k else params.top_k,
        "stop": list(params.stop),
        "stop_token_ids": [int(i) for i in params.stop_token_ids],
        "ignore_eos": not params.stop_token_ids,  # then neither the model's EOS ids nor stop_token_ids end a completion
        "sampling_seed": int(request.seed),
    }
    if interval is not None:
        sampling["stream_interval"] = interval
    body = {
        "rid": request.id,
        **_prompt_of(request),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        "extra_key": cache_key,
    }
    return body | ({"incremental": True} if incremental else {})


def _prompt_of(request: Request) -> dict[str, Any]:
    """Returns the prompt as token ids; with pictures as text, for SGLang's processor makes the ids."""
    if request.pictures:
        return {"text": request.marked_text, "image_data": list(request.pictures)}
    return {"input_ids": [int(i) for i in request.prompt_ids]}


# Requests, at our server --------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses a JSON object strictly: no NaN, no half of a character, no other top-level value.

    Raises BadRequest.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant) if body else {}
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadRequest(f"body: not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"body: a JSON object is needed, not {type(value).__name__}")
    if _MAY_BE_HALF.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("body: half of a surrogate pair (\\ud800 to \\udfff) is no character") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse_generate(
    body: Mapping[str, Any], *, encode: Callable[[str], list[int]] | None = None, default_stop_ids: Sequence[int] = ()
) -> ParsedRequest:
    """Parses the body of /generate. Raises BadRequest.

    Args:
      encode: the tokenizer's `encode_document`, for "text" prompts; None if only "input_ids" are
        accepted.
      default_stop_ids: the model's EOS ids, which end a completion beside those that a request
        names, unless it ignores them.
    """
    _check_keys(body)
    sampling = _get(body, "sampling_params", dict, {})
    stop_ids = tuple(dict.fromkeys((*_stop_token_ids(sampling), *default_stop_ids)))
    if _get(sampling, "ignore_eos", bool, False):  # SGLang reads no stop ids then
        stop_ids = ()
    temperature = _number(sampling, "temperature", 1.0)
    greedy = temperature == GREEDY_TEMPERATURE
    top_k = _integer(sampling, "top_k", NO_TOP_K)
    for name, value in sampling.items():
        if name in NEUTRAL and value is not None and value != NEUTRAL[name]:
            raise BadRequest(f"sampling_params.{name}: not supported by this server (leave it at {NEUTRAL[name]})")
        if name not in NEUTRAL and name not in INDIFFERENT and name not in _READ:
            raise BadRequest(f"sampling_params.{name}: no such parameter ({nearest(name, [*_READ, *NEUTRAL])})")
    try:
        params = SamplingParams(
            max_new_tokens=_integer(sampling, "max_new_tokens", 128),
            min_new_tokens=_integer(sampling, "min_new_tokens", 0),
            temperature=1.0 if greedy else temperature,
            top_p=_number(sampling, "top_p", 1.0),
            top_k=0 if top_k == NO_TOP_K or greedy else top_k,
            greedy=greedy,
            stop=_stop_strings(sampling),
            stop_token_ids=stop_ids,
        )
    except ValueError as error:
        raise BadRequest(f"sampling_params: {error}") from None
    seed = _integer(sampling, "sampling_seed", None)
    if not -MAX_SEED <= seed < MAX_SEED:
        raise BadRequest(f"sampling_params.sampling_seed: must lie in [-2**63, 2**63), not {seed}")
    request = Request(_rid(body), _prompt(body, encode), params, seed)
    return ParsedRequest(
        request,
        stream=_get(body, "stream", bool, False),
        return_logprob=_get(body, "return_logprob", bool, False),
        incremental=_get(body, "incremental", bool, False),
        skip_special_tokens=_get(sampling, "skip_special_tokens", bool, True),
        stop_trim=not _get(sampling, "no_stop_trim", bool, False),
    )


_KEYS = frozenset(("text", "input_ids", "sampling_params", "return_logprob", "stream", "incremental", "rid"))
_READ = frozenset(
    ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k")
    + ("stop", "stop_token_ids", "ignore_eos", "sampling_seed", "skip_special_tokens", "no_stop_trim")
)


def _check_keys(body: Mapping[str, Any]) -> None:
    """Refuses keys that would be ignored. Raises BadRequest."""
    for name, value in body.items():
        if name in NEUTRAL_KEYS:
            if value is not None and value not in NEUTRAL_KEYS[name]:
                neutral = " or ".join(map(repr, (None, *NEUTRAL_KEYS[name])))
                raise BadRequest(f"{name}: not supported by this server (leave it at {neutral})")
        elif name not in _KEYS and name not in INDIFFERENT_KEYS:
            raise BadRequest(f"{name}: no such key ({nearest(name, [*_KEYS, *NEUTRAL_KEYS])})")


def _get(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadRequest(f"{name}: must be {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(body: Mapping[str, Any], name: str, default: int | None) -> int:
    """Reads an integer. A default of None draws a random one: requests without a seed all differ."""
    value = body.get(name)
    if value is None:
        return uuid.uuid4().int % 2**31 if default is None else default
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{name}: must be an integer, not {type(value).__name__}")
    if abs(value) > MAX_SEED:
        raise BadRequest(f"{name}: out of range (at most 2**63)")
    return value


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadRequest(f"{name}: must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 is valid JSON
        raise BadRequest(f"{name}: must be finite")
    return number


def _rid(body: Mapping[str, Any]) -> str:
    rid = _get(body, "rid", str, None)
    if rid is None:
        return uuid.uuid4().hex
    if not 0 < len(rid) <= 256:
        raise BadRequest("rid: 1 to 256 characters")
    return str(rid)


def _prompt(body: Mapping[str, Any], encode: Callable[[str], list[int]] | None) -> np.ndarray:
    """Returns the prompt, [P] int32. The sampler checks the vocabulary and the context length."""
    text, ids = _get(body, "text", str, None), _get(body, "input_ids", list, None)
    if (text is None) == (ids is None):
        raise BadRequest("input_ids: one of input_ids (a list of token ids) and text is needed")
    if ids is None:
        if encode is None:
            raise BadRequest("text: this server has no tokenizer (send input_ids)")
        if len(text) > MAX_TEXT:
            raise BadRequest(f"text: {len(text)} characters (at most {MAX_TEXT})")
        try:
            ids = encode(text)
        except UnicodeEncodeError:
            raise BadRequest("text: contains half of a surrogate pair (send valid Unicode)") from None
    if not ids:
        raise BadRequest("input_ids: the prompt is empty")
    return np.array(_token_ids(ids, "input_ids"), np.int32)


def _token_ids(ids: Sequence[Any], name: str) -> list[int]:
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadRequest(f"{name}: must be a list of token ids (one prompt per request)")
    return list(ids)


def _stop_token_ids(sampling: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_token_ids(_get(sampling, "stop_token_ids", list, []), "sampling_params.stop_token_ids"))


def _stop_strings(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    stop = sampling.get("stop")
    stops = [stop] if isinstance(stop, str) else _get(sampling, "stop", list, [])
    if not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


# Replies, from our server -------------------------------------------------------------------------------------------------


def reply(
    parsed: ParsedRequest,
    token_ids: np.ndarray,
    logp: np.ndarray,
    versions: np.ndarray,
    finish: Finish | None,
    *,
    total: int,
    version: int,
    text: str,
) -> dict[str, Any]:
    """Builds one chunk of a stream, or a whole reply.

    Args:
      token_ids, logp, versions: [T], the tokens in this chunk.
      total: tokens of the completion so far, earlier chunks included.
      version: current version of the weights; labels a chunk that has no tokens.
      text: of the tokens in this chunk.
    """
    stop = None
    if finish is Finish.STOP:
        cut, stop = cut_text(text, parsed.request.params.stop)
        text = cut if parsed.stop_trim else text
    meta: dict[str, Any] = {
        "id": parsed.request.id,
        "finish_reason": None if finish is None else _finish_reason(finish, parsed, token_ids, total, stop),
        "prompt_tokens": len(parsed.request.prompt_ids),
        "completion_tokens": total,
        "cached_tokens": 0,
        "weight_version": str(int(versions[-1]) if len(versions) else version),
        "weight_versions": spans(versions, total - len(versions)),
    }
    if parsed.return_logprob:
        meta["output_token_logprobs"] = [
            [_finite(value), int(token), None] for value, token in zip(logp, token_ids, strict=True)
        ]
    return {"text": text, "output_ids": [int(i) for i in token_ids], "meta_info": meta}


def _finish_reason(
    finish: Finish, parsed: ParsedRequest, token_ids: np.ndarray, total: int, stop: str | None
) -> dict[str, Any]:
    if finish is Finish.LENGTH:
        return {"type": "length", "length": total}
    if finish is Finish.ABORT:
        return {"type": "abort", "message": "Aborted"}
    last = int(token_ids[-1]) if len(token_ids) else None
    if last in parsed.request.params.stop_token_ids:
        return {"type": str(finish), "matched": last}
    return {"type": str(finish), "matched": stop}


def cut_text(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Cuts a text before the first stop string in it. Returns the rest, and that stop string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[0]], min(found)[1]) if found else (text, None)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def spans(versions: Iterable[int], start: int = 0) -> list[dict[str, Any]]:
    """Groups equal versions into runs, as SGLang 0.5.23 reports them, counting tokens from `start`.

    Example: spans([5, 5, 6]) ==
        [{"version": "5", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 3}]
    """
    found: list[dict[str, Any]] = []
    for index, version in enumerate(versions, start):
        if found and found[-1]["version"] == str(version):
            found[-1]["end"] = index + 1
        else:
            found.append({"version": str(version), "start": index, "end": index + 1})
    return found
