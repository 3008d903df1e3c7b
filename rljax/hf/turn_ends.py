"""Ids that end a turn, in the files of a model directory that say so to other programs.

The chat template of a base model may end turns with another token than its files name. Training
stops at all of them; whoever loads an export has to know them too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.errors import UserError
from rljax.hf.init import GENERATION_CONFIG
from rljax.hf.spec import CONFIG
from rljax.hf.tokenizer import load_tokenizer
from rljax.hf.weights import write_json

_SCHEMA: json_fields.Schema = {"eos_token_id": json_fields.TOKEN_IDS}
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"

log = logging.getLogger(__name__)


def write_turn_ends(directory: Path, token_ids: Sequence[int] = (), source: Path | None = None) -> None:
    """Adds the ids that ended turns to a model directory, where its files lack them.

    generation_config.json and config.json get all of them, and tokenizer_config.json the token that
    the chat template writes behind an assistant's text. A directory without a tokenizer stays as it
    is.

    Args:
      token_ids: ids that ended turns, beside the tokenizer's own (`gconfig.stop_token_ids`).
      source: directory with the same tokenizer, which may have been read already.
    """
    if not (directory / TOKENIZER_CONFIG).is_file() or not (directory / "tokenizer.json").is_file():
        return
    try:
        _write(directory, token_ids, *_turn_ends(source or directory))
    except UserError as error:  # the weights are worth more than this
        log.warning("%s: the ids that end turns are not written: %s", directory, error)


def _write(directory: Path, token_ids: Sequence[int], known: Sequence[int], token: str | None) -> None:
    """Adds ids, and the token that the chat template writes. Raises UserError."""
    ids = list(dict.fromkeys([*known, *map(int, token_ids)]))
    for name in (GENERATION_CONFIG, CONFIG):
        path = directory / name
        content = _read(path)
        if name == CONFIG and not content:
            continue
        if not set(ids) <= set(_listed(content.get("eos_token_id"))):
            write_json(path, content | {"eos_token_id": ids[0] if len(ids) == 1 else ids})
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        content = _read(directory / name)
        if token is not None and content and _text(content.get("eos_token")) != token:
            write_json(directory / name, content | {"eos_token": token})


@functools.lru_cache(maxsize=8)
def _turn_ends(directory: Path) -> tuple[tuple[int, ...], str | None]:
    """Returns the ids that end turns, and the token that the chat template writes for it.

    No token if the template writes `eos_token` itself, which would change with it.
    """
    tokenizer = load_tokenizer(directory)
    if not tokenizer.has_chat_template or "eos_token" in tokenizer.chat_template:
        return tokenizer.eos_token_ids, None
    return tokenizer.eos_token_ids, tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [] if value is None else [int(value)]


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read(path: Path) -> dict[str, Any]:
    """Reads a file of the directory; empty without one. Raises UserError."""
    return json_fields.read_object(path, _SCHEMA) if path.is_file() else {}
