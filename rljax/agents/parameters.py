"""Bodies of /v1/chat/completions and /v1/completions, parsed and checked.

A parameter is read, or has a value that changes nothing, or is refused by its name; none is ignored
in silence. `model` may be any name, for there is one model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rljax.agents.errors import CONTEXT_EXCEEDED, ApiError
from rljax.chat.messages import Message, Tool, parse_messages, parse_template_kwargs, parse_tools, text_of
from rljax.config.registry import nearest
from rljax.errors import UserError

MAX_CHOICES = 128
MAX_TEXT = 4_000_000  # characters of a request's prompts
MAX_STOPS, MAX_STOP_LENGTH = 32, 1024  # stop strings, and characters of one
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
MAX_SEED = 2**63

# Parameters that name who asks, for logs and billing: they change no completion.
LABELS = ("model", "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
# Parameters that are not supported, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens", "stop", "stop_token_ids", "seed")
SHARED = (*SAMPLING, "n", "stream", "stream_options", "return_token_ids", *LABELS, *NEUTRAL)
CHAT = (*SHARED, "messages", "tools", "tool_choice", "logprobs", "max_completion_tokens", "chat_template_kwargs")
COMPLETION = (*SHARED, "prompt", "logprobs", "best_of")


@dataclasses.dataclass(frozen=True)
class SamplingRequest:
    """Sampling parameters that a request names; None where it names none."""

    temperature: float | None
    top_p: float | None
    top_k: int | None  # 0: no limit
    min_tokens: int | None
    max_tokens: int | None
    max_tokens_name: str  # the parameter that set it
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None


@dataclasses.dataclass(frozen=True)
class ReplyOptions:
    """Shape of a reply."""

    n: int
    stream: bool
    include_usage: bool  # in a stream, a last chunk with it
    logprobs: bool
    token_ids: bool  # the ids of prompt and completion, too


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """The body of /v1/chat/completions."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    calls_tools: bool  # replies are searched for calls
    template_kwargs: Mapping[str, Any]
    sampling: SamplingRequest
    reply: ReplyOptions


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """The body of /v1/completions."""

    prompts: tuple[str | tuple[int, ...], ...]  # text, or token ids
    sampling: SamplingRequest
    reply: ReplyOptions


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Parses the body of /v1/chat/completions. Raises ApiError."""
    given = _given(body, CHAT)
    try:
        messages = parse_messages(_required(given, "messages"), "messages")
        tools = parse_tools(given.get("tools", []), "tools")
        template_kwargs = parse_template_kwargs(given.get("chat_template_kwargs", {}), "chat_template_kwargs")
    except UserError as error:
        text = str(error).removeprefix("messages: ").removeprefix("tools: ").removeprefix("chat_template_kwargs: ")
        raise ApiError(text, param=text.partition(":")[0].split(" ")[0], code="invalid_value") from None
    _check_length(sum(len(text_of(message)) for message in messages), "messages")
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError("tool_choice: only 'auto' and 'none' are supported", param="tool_choice", code="unsupported_value")
    sampling = _sampling(given, "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens")
    if "max_completion_tokens" in given and "max_tokens" in given:
        raise ApiError("max_tokens and max_completion_tokens: give one of them", param="max_tokens", code="invalid_value")
    logprobs = _get(given, "logprobs", bool, False)
    calls = bool(tools) and choice == "auto"
    return ChatRequest(messages, tools, calls, template_kwargs, sampling, _reply(given, logprobs))


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Parses the body of /v1/completions. Raises ApiError."""
    given = _given(body, COMPLETION)
    top = _integer(given, "logprobs", 0, MAX_CHOICES)
    if top:
        raise ApiError(
            "logprobs: log-probs of the sampled tokens alone are available (0)", param="logprobs", code="unsupported_value"
        )
    reply = _reply(given, top is not None)
    if (best := _integer(given, "best_of", 1, MAX_CHOICES)) not in (None, reply.n):
        raise ApiError(f"best_of: {best} is not supported (only n)", param="best_of", code="unsupported_value")
    given = {"max_tokens": COMPLETION_TOKENS} | given
    return CompletionRequest(_prompts(_required(given, "prompt")), _sampling(given, "max_tokens"), reply)


def _given(body: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Returns the parameters that have a value. Raises ApiError for those that are not supported."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            hint = nearest(name, known)
            raise ApiError(f"Unrecognized request argument supplied: {name} ({hint})", param=name, code="unknown_parameter")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            allowed = f" (only {' or '.join(repr(neutral) for neutral in NEUTRAL[name])})" if NEUTRAL[name] else ""
            raise ApiError(f"{name}: not supported{allowed}", param=name, code="unsupported_parameter")
    _get(given, "model", str, "")
    return given


def _required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise ApiError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    return given[name]


def _sampling(given: Mapping[str, Any], max_tokens_name: str) -> SamplingRequest:
    top_k = _integer(given, "top_k", -1, 2**31)
    return SamplingRequest(
        temperature=_number(given, "temperature", 0.0, 2.0),
        top_p=_number(given, "top_p", 0.0, 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_tokens=_integer(given, "min_tokens", 0, 2**31),
        max_tokens=_integer(given, max_tokens_name, 1, 2**31),
        max_tokens_name=max_tokens_name,
        stop=_stop(given),
        stop_token_ids=_token_ids(given.get("stop_token_ids", []), "stop_token_ids"),
        seed=_integer(given, "seed", -MAX_SEED, MAX_SEED),
    )


def _reply(given: Mapping[str, Any], logprobs: bool) -> ReplyOptions:
    stream = _get(given, "stream", bool, False)
    options = _get(given, "stream_options", dict, {})
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise ApiError(f"stream_options.{name}: not supported", param=f"stream_options.{name}", code="unknown_parameter")
    if options and not stream:
        raise ApiError("stream_options: only with stream", param="stream_options", code="invalid_value")
    return ReplyOptions(
        n=_integer(given, "n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=_get(options, "include_usage", bool, False),
        logprobs=logprobs,
        token_ids=_get(given, "return_token_ids", bool, False),
    )


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Returns the prompts: one of text or of ids, or several."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = [_prompt(each) for each in (value if several else [value])]
    if len(prompts) > MAX_CHOICES:
        raise ApiError(f"prompt: at most {MAX_CHOICES} at once", param="prompt", code="invalid_value")
    _check_length(sum(len(prompt) for prompt in prompts), "prompt")
    return tuple(prompts)


def _check_length(length: int, name: str) -> None:
    if length > MAX_TEXT:
        raise ApiError(f"{name}: {length} characters (at most {MAX_TEXT})", param=name, code=CONTEXT_EXCEEDED)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    return _token_ids(value, "prompt")


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    valid = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not valid or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise ApiError(
            f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop", code="invalid_value"
        )
    return tuple(stops)


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise ApiError(f"{name}: text or a list of token ids", param=name, code="invalid_type")
    return tuple(value)


def _get(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ApiError(f"{name}: must be {kind.__name__}, not {type(value).__name__}", param=name, code="invalid_type")
    return value


def _integer(given: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = _number(given, name, least, most)
    if value is not None and value != int(value):
        raise ApiError(f"{name}: must be an integer", param=name, code="invalid_type")
    return None if value is None else int(given[name])


def _number(given: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ApiError(f"{name}: must be a number, not {type(value).__name__}", param=name, code="invalid_type")
    if not least <= value <= most or (isinstance(value, float) and not math.isfinite(value)):
        raise ApiError(f"{name}: {value} is out of range ({least:g} to {most:g})", param=name, code="invalid_value")
    return value
