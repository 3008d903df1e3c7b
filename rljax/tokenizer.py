"""The tokenizer that both paths share: token ids, text and chat templates of a HF model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What workflows, samplers and logs need of a tokenizer."""

    eos_token_ids: tuple[int, ...]  # every id that ends a turn: generation_config.json, config.json, tokenizer, joined
    pad_token_id: int  # may equal an EOS id: padding is known by length, never by id

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]: ...
