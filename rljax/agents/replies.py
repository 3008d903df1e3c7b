"""JSON of the endpoint's replies: whole ones, and the chunks of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rljax.agents.dialogue import to_openai
from rljax.agents.exchange import Choice, Delta, Exchange
from rljax.hf.tokenizer import HFTokenizer

LOWEST_LOGP = -9999.0  # OpenAI's value for a log-prob of minus infinity


def chat_reply(exchange: Exchange, model: str) -> dict[str, Any]:
    choices = []
    for choice in exchange.choices:
        assert choice.message is not None
        entry = {"index": choice.index, "message": to_openai(choice.message), "finish_reason": str(choice.finish)}
        entry["logprobs"] = {"content": _tokens(choice, exchange.dialogue.tokenizer)} if exchange.options.logprobs else None
        choices.append(entry | _token_ids(exchange, choice))
    return _reply(exchange, model, "chat.completion", choices) | {"usage": usage(exchange.choices)} | _prompt_ids(exchange)


def completion_reply(exchange: Exchange, model: str) -> dict[str, Any]:
    choices = []
    for choice in exchange.choices:
        entry = {"index": choice.index, "text": choice.text, "finish_reason": str(choice.finish), "logprobs": None}
        if exchange.options.logprobs:
            entry["logprobs"] = _legacy_tokens(choice, exchange.dialogue.tokenizer)
        choices.append(entry | _token_ids(exchange, choice))
    return _reply(exchange, model, "text_completion", choices) | {"usage": usage(exchange.choices)} | _prompt_ids(exchange)


def first_chat_chunks(exchange: Exchange, model: str) -> list[dict[str, Any]]:
    """Returns the chunks that open the choices of a chat, with the role."""
    opening = {"role": "assistant", "content": "", "refusal": None}
    return [_chat_chunk(exchange, model, choice.index, opening) for choice in exchange.choices]


def chat_chunks(exchange: Exchange, model: str, delta: Delta) -> list[dict[str, Any]]:
    """Returns the chunks that tell of a delta; the last one of a choice has the finish reason."""
    index, chunks = delta.choice.index, []
    reasoning, content = delta.reasoning, delta.content
    calls: Sequence[dict[str, Any]] = ()
    if delta.done and delta.choice.visible is None and delta.choice.message is not None:  # nothing of it was sent yet
        message = to_openai(delta.choice.message)
        reasoning, content = message.get("reasoning_content", ""), message["content"] or ""
        calls = message.get("tool_calls", ())
    if reasoning:
        chunks.append(_chat_chunk(exchange, model, index, {"reasoning_content": reasoning}))
    if content:
        chunks.append(_chat_chunk(exchange, model, index, {"content": content}))
    if calls:
        numbered = [{"index": i} | call for i, call in enumerate(calls)]
        chunks.append(_chat_chunk(exchange, model, index, {"tool_calls": numbered}))
    if delta.done:
        last = _chat_chunk(exchange, model, index, {}, finish=str(delta.choice.finish))
        (entry,) = last["choices"]
        if exchange.options.logprobs:
            entry["logprobs"] = {"content": _tokens(delta.choice, exchange.dialogue.tokenizer)}
        chunks.append(last | {"choices": [entry | _token_ids(exchange, delta.choice)]})
    return chunks


def completion_chunks(exchange: Exchange, model: str, delta: Delta) -> list[dict[str, Any]]:
    entry: dict[str, Any] = {"index": delta.choice.index, "text": delta.content, "finish_reason": None, "logprobs": None}
    if delta.done:
        entry |= {"finish_reason": str(delta.choice.finish)} | _token_ids(exchange, delta.choice)
        if exchange.options.logprobs:
            entry["logprobs"] = _legacy_tokens(delta.choice, exchange.dialogue.tokenizer)
    elif not delta.content:
        return []
    return [_reply(exchange, model, "text_completion", [entry])]


def usage_chunk(exchange: Exchange, model: str, kind: str) -> dict[str, Any]:
    """Returns the last chunk of a stream that was asked to include the usage."""
    return _reply(exchange, model, kind, []) | {"usage": usage(exchange.choices)}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompts = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}
    prompt = sum(prompts.values())
    sampled = sum(len(choice.completion.token_ids) for choice in choices if choice.completion is not None)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _reply(exchange: Exchange, model: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": exchange.id, "object": kind, "created": exchange.created, "model": model, "choices": choices}


def _chat_chunk(exchange: Exchange, model: str, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    entry = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    return _reply(exchange, model, "chat.completion.chunk", [entry])


def _token_ids(exchange: Exchange, choice: Choice) -> dict[str, Any]:
    if not exchange.options.token_ids or choice.completion is None:
        return {}
    return {"token_ids": choice.completion.token_ids.tolist(), "versions": choice.completion.versions.tolist()}


def _prompt_ids(exchange: Exchange) -> dict[str, Any]:
    return {"prompt_token_ids": exchange.choices[0].prompt_ids.tolist()} if exchange.options.token_ids else {}


def _tokens(choice: Choice, tokenizer: HFTokenizer) -> list[dict[str, Any]]:
    """Returns all sampled tokens with their log-probs, the one that ended the completion included."""
    assert choice.completion is not None
    pieces = tokenizer.pieces(choice.completion.token_ids)
    return [
        {"token": piece, "logprob": _logp(logp), "bytes": list(piece.encode(errors="replace")), "top_logprobs": []}
        for piece, logp in zip(pieces, choice.completion.logp.tolist(), strict=True)
    ]


def _legacy_tokens(choice: Choice, tokenizer: HFTokenizer) -> dict[str, Any]:
    assert choice.completion is not None
    pieces = tokenizer.pieces(choice.completion.token_ids)
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    logps = [_logp(logp) for logp in choice.completion.logp.tolist()]
    return {"tokens": pieces, "token_logprobs": logps, "top_logprobs": None, "text_offset": offsets[:-1]}


def _logp(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGP
