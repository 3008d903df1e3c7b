"""The task for timing rljax and its peers: prompts of 8 words, a reward that costs nothing.

The vocabulary has 1000 words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax.config.schema import ModelConfig
from rljax.hf import init_directory

WORDS = 1000
PROMPTS = 512
BATCH = 8  # prompts per step
SAMPLES = 8  # per prompt
PROMPT, COMPLETION = 8, 32  # tokens
MODEL = ModelConfig(
    architecture="llama",
    hidden_size=256,
    intermediate_size=1024,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    initializer_range=0.02,
    tokenizer="",
)


def distinct_words(prompt: Any, completion: str) -> float:
    """Returns a number that differs within a group."""
    return float(len(set(completion.split())) % 7)


def prompts() -> list[str]:
    return [" ".join(f"w{(i * 7 + j * 13) % (WORDS - 2)}" for j in range(PROMPT)) for i in range(PROMPTS)]


def make(directory: Path) -> tuple[Path, Path]:
    """Writes model directory and dataset, the same bytes for everyone. Returns their paths."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model, data = directory / "model", directory / "data.jsonl"
    model.mkdir(parents=True)
    vocabulary = {f"w{i}": i for i in range(WORDS - 2)} | {"<eos>": WORDS - 2, "<pad>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.save(str(model / "tokenizer.json"))
    settings: Mapping[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    init_directory(MODEL, model, seed=0, vocab_size=WORDS, eos_token_ids=[WORDS - 2], pad_token_id=WORDS - 1)
    data.write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in prompts()))
    return model, data
