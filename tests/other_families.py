"""Random models of transformers' families that rljax has no implementation of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from rljax.hf.tokenizer import build_char_tokenizer
from rljax.testing.models import EOS, VOCABULARY

SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)
GATED = SMALL | dict(intermediate_size=48)


def made(family: str, settings: dict[str, Any], directory: Path) -> Any:
    """Writes a model with a character-level tokenizer, and returns transformers' module.

    No parameter has its neutral value.
    """
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**settings)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    theirs.save_pretrained(directory)
    build_char_tokenizer(directory)
    return theirs
