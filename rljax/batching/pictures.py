"""Pictures of packed rows as an array: a batch is arrays alone, which any process can be sent.

A row's bytes are the JSON list of its pictures' data URLs, in the order of the row's tokens, with
zeros behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np


def encode_pictures(rows: Sequence[Sequence[str]]) -> np.ndarray:
    """Encodes the data URLs of R rows, [R, B] uint8; the inverse of `decode_pictures`."""
    texts = [json.dumps(list(urls)).encode() for urls in rows]
    encoded = np.zeros((len(texts), max(map(len, texts), default=0)), np.uint8)
    for row, text in zip(encoded, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return encoded


def decode_pictures(encoded: np.ndarray) -> list[tuple[str, ...]]:
    """Decodes [R, B] uint8 to the data URLs of each row. A row of zeros has none."""
    texts = [row.tobytes().rstrip(b"\0") for row in encoded]
    return [tuple(json.loads(text)) if text else () for text in texts]
