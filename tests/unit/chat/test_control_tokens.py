"""Counts of many texts, whose shared ends are counted once: the same as one text after another."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rljax.chat.control_tokens import ControlTokens

OPEN, CLOSE, LONG = "<open>", "<close>", "x<close>"
CORPUS = ["the sum of two numbers is a number", "  what  is the number of the sums", "user system assistant\nuser"]
PIECES = ["the sum", "  ", " of", "number ", "\n", "user", "", OPEN, CLOSE, "é", "open", "<", "x"]
SPLITS = {
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    "whole": lambda: None,  # runs of text are one piece
}
TOKENS = {
    "firm": {},
    "left": {"lstrip": True},
    "right": {"rstrip": True},
    "word": {"single_word": True},
    "normalized": {"normalized": True},
}


def made(split, token, beside=""):
    backend = Tokenizer(models.BPE())
    if (pre := SPLITS[split]()) is not None:
        backend.pre_tokenizer = pre
    if beside == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    added = [AddedToken(text, special=True, **{"normalized": False, **TOKENS[token]}) for text in (OPEN, CLOSE)]
    added += [AddedToken(LONG, special=True, normalized=False)] if beside == "longer" else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(" \né▁<>")
    backend.train_from_iterator(CORPUS * 2, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(added)
    return ControlTokens(PreTrainedTokenizerFast(tokenizer_object=backend), OPEN + CLOSE)


def texts_of(random, count=8):
    """Returns texts with a beginning and an end in common, of pieces that tokens may take in or not."""
    head, tail = ("".join(random.choice(PIECES, 5)) for _ in range(2))
    return [f"{head}{OPEN}{''.join(random.choice(PIECES, random.integers(6)))}{CLOSE}{tail}" for _ in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("beside", ["", "longer", "prepend"])
def test_counts_of_many_texts_are_those_of_their_ids(split, token, beside):
    control, random = made(split, token, beside), np.random.default_rng(0)
    for texts in [texts_of(random) for _ in range(4)]:
        assert control.counts(texts) == [len(control.encode(text)) for text in texts]


def test_what_texts_share_at_both_ends_is_counted_once():
    control = made("bytes", "firm")
    texts = [f"the sum{OPEN}system{OPEN}user{text}{CLOSE} is" for text in ("", " of", " of the number")]
    assert control._shared_ends(texts) == (len(f"the sum{OPEN}system"), len(f"{CLOSE} is"))
    assert control._shared_ends([OPEN + CLOSE] * 2) == (len(OPEN), len(CLOSE))  # no character is cut off at both ends
