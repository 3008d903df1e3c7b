"""A tiny Llama that calls a calculator and then says the result, for tests with real servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.chat.messages import parse_messages, parse_tools
from rljax.hf.tokenizer import HFTokenizer, build_char_tokenizer, load_tokenizer
from rljax.types import Prompt

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CALCULATOR: dict[str, Any] = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
SUMS = ("2+3", "4+1", "7*8", "9-5")
STEPS = 300
ANSWERS = ("It is {}.", "{}, I think.")  # it says either, so that log-probs are not all 0


def make_calling_model(directory: Path) -> Path:
    """Writes the model, float32, after some seconds of supervised training on SUMS."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = build_char_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    batch = _conversations(load_tokenizer(directory))
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=512, **shape, **special))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=STEPS)
    for _ in range(STEPS):
        loss = model(input_ids=torch.as_tensor(batch[0]), labels=torch.as_tensor(batch[1])).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def _conversations(tokenizer: HFTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids and labels, both [conversations, T] int64; -100 where nothing is learned."""
    rows = [_labeled(tokenizer, text, answer) for text in SUMS for answer in ANSWERS]
    width = max(len(ids) for ids, _ in rows)
    ids, labels = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -100, np.int64)
    for row, (tokens, learned) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = np.where(learned, tokens, -100)
    return ids, labels


def _labeled(tokenizer: HFTokenizer, text: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": {"expression": text}}}
    said: Sequence[dict[str, Any]] = (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": str(eval(text))},
        {"role": "assistant", "content": answer.format(eval(text))},
    )
    messages = parse_messages([{"role": "user", "content": text}, *said], "calling_model")
    prompt = Prompt("0", tuple(messages[:1]), {}, tools=parse_tools([CALCULATOR], "calling_model"))
    return tokenizer.encode_labeled(prompt, messages[1:])
