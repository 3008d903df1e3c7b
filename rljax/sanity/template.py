"""Tokenizer, chat template and model directory: whether they agree with each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljax.hf.tokenizer import Tokenizer
from rljax.sanity.findings import Finding, Severity

PART = "tokenizer"
_USER = ({"role": "user", "content": "What is 12+30?"},)


def check_tokenizer(tokenizer: Tokenizer, model_dir: Path) -> Iterator[Finding]:
    """Checks vocabulary, EOS and pad of a tokenizer against the model's own files."""
    config = _read(model_dir / "config.json")
    config = config | config.get("text_config", {})
    size = config.get("vocab_size")
    if isinstance(size, int):
        yield from _vocabulary(tokenizer, size)
    named = {name: _ids(_read(model_dir / name).get("eos_token_id")) for name in ("generation_config.json", "config.json")}
    missing = {name: ids for name, ids in named.items() if ids and tokenizer.eos_token_id not in ids}
    if missing:
        lists = ", ".join(f"{name} has {sorted(ids)}" for name, ids in missing.items())
        line = f"a turn ends with token {tokenizer.eos_token_id} ({_text(tokenizer, tokenizer.eos_token_id)}), and {lists}"
        remedy = "training stops at all of them, but other programs that load the model run past the turn's end"
        yield Finding(Severity.WARNING, PART, line, remedy)
    out_of_range = [token for token in tokenizer.eos_token_ids if not 0 <= token < tokenizer.vocab_size]
    if out_of_range:
        yield Finding(Severity.ERROR, PART, f"EOS ids {out_of_range} are no tokens (the vocabulary has {tokenizer.vocab_size})")
    if tokenizer.pad_token_id in tokenizer.eos_token_ids:
        yield Finding(
            Severity.NOTE, PART, "pad and EOS are one token: padding is known by length here, elsewhere it may not be"
        )


def _vocabulary(tokenizer: Tokenizer, size: int) -> Iterator[Finding]:
    if tokenizer.vocab_size > size:
        line = f"its vocabulary of {tokenizer.vocab_size} exceeds the model's {size}: ids from {size} on have no embedding"
        yield Finding(Severity.ERROR, PART, line, "the two are of different models, or the embedding was not resized")
    else:
        unused = f", {size - tokenizer.vocab_size} embeddings unused" if size > tokenizer.vocab_size else ""
        yield Finding(Severity.GOOD, PART, f"vocabulary of {tokenizer.vocab_size} within the model's {size}{unused}")


def check_template(tokenizer: Tokenizer) -> Iterator[Finding]:
    """Checks what the chat template makes of a conversation."""
    opened = tokenizer.apply_chat_template(_USER)
    closed = tokenizer.apply_chat_template(_USER, add_generation_prompt=False)
    if not opened:
        yield Finding(Severity.ERROR, "template", "a user's message gives no tokens", "put a template into chat_template.jinja")
        return
    if opened == closed and len(opened) > len(tokenizer.encode(_USER[0]["content"])):
        line = "it marks turns, but opens none for the assistant: the policy may write the user's turn"
        yield Finding(Severity.WARNING, "template", line, "use add_generation_prompt in chat_template.jinja")
    if len(opened) > 1 and opened[0] == opened[1]:
        yield Finding(
            Severity.WARNING, "template", f"prompts begin with token {opened[0]} twice", "the template adds a second BOS"
        )
    if tokenizer.apply_chat_template(_USER) != opened:
        yield Finding(Severity.WARNING, "template", "it renders one conversation differently each time")
    rendered = tokenizer.decode(opened, skip_special_tokens=False)
    yield Finding(Severity.NOTE, "template", f"a prompt is {rendered!r}, and a turn ends with {_end(tokenizer)}")


def check_text(tokenizer: Tokenizer, texts: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that texts, by their place, survive encoding and decoding."""
    lost = {where: text for where, text in texts.items() if tokenizer.decode(tokenizer.encode(text)) != text}
    unknown = {where: text for where, text in lost.items() if tokenizer.unknown(text)}
    if unknown:
        where, text = next(iter(unknown.items()))
        line = (
            f"{len(unknown)} of {len(texts)} answers have characters without a token, as {tokenizer.unknown(text)!r} in {where}"
        )
        yield Finding(Severity.WARNING, PART, line, "the policy can't write them")
    elif lost:
        where = next(iter(lost))
        line = f"{len(lost)} of {len(texts)} answers come back changed from encoding and decoding, as {where}"
        yield Finding(Severity.WARNING, PART, line, "rewards that compare text see the changed one")


def _end(tokenizer: Tokenizer) -> str:
    return f"token {tokenizer.eos_token_id} ({_text(tokenizer, tokenizer.eos_token_id)})"


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < tokenizer.vocab_size else "no token"


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def _read(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if it can't be read, which the part that loads the model reports."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
