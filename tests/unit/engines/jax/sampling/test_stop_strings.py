"""Stop strings in the text of a completion, token by token, against the whole text decoded anew at
every token.
"""

import numpy as np
import pytest

from rljax.engines.jax.sampling.stop_strings import StopStrings


class Bytes:
    """One token a byte; bytes that are no character decode to U+FFFD, as byte-level tokenizers do."""

    eos_token_ids = (256,)
    pad_token_id = 256

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode("utf-8", errors="replace")


class Words(Bytes):
    """A word a token, joined by spaces: the text of a token depends on whether it is the first."""

    words = ("the", "end", "stop", "here", ".")

    def decode(self, token_ids, *, skip_special_tokens=True):
        return " ".join(self.words[i] for i in token_ids)


def first_match(tokenizer, token_ids, stops):
    """The first token at which the whole text contains a stop string."""
    for count in range(1, len(token_ids) + 1):
        if any(stop in tokenizer.decode(token_ids[:count]) for stop in stops):
            return count
    return None


def pushed(tokenizer, token_ids, stops):
    matcher = StopStrings(tokenizer, stops)
    return next((count for count, token in enumerate(token_ids, 1) if matcher.push(token)), None)


@pytest.mark.parametrize("stops", [("end",), ("é",), ("d é",), ("x", "long stop"), ("€uro",), ("🎉!",), ("\n\n",)])
def test_bytes_as_tokens(stops):
    token_ids = list("a friend é a €uro 🎉! and a long stop\n\n".encode())
    assert pushed(Bytes(), token_ids, stops) == first_match(Bytes(), token_ids, stops) is not None


@pytest.mark.parametrize("stops", [("end stop",), ("the end",), (" here",), ("stop .", "nd s"), ("absent",)])
def test_words_as_tokens(stops):
    token_ids = [0, 0, 1, 2, 3, 4, 1, 0, 1, 2]
    assert pushed(Words(), token_ids, stops) == first_match(Words(), token_ids, stops)


def test_random_bytes_that_are_mostly_no_text():
    generator = np.random.default_rng(0)
    for _ in range(200):
        token_ids = generator.choice([*b"ab", 0xC3, 0xA9, 0xE2, 0xFF], 40).tolist()
        assert pushed(Bytes(), token_ids, ("aba", "b\u00e9")) == first_match(Bytes(), token_ids, ("aba", "b\u00e9"))


def test_a_stop_string_is_reported_once_where_it_ends():
    """Passed over before min_new_tokens, it must not end the completion one token later."""
    matcher = StopStrings(Bytes(), ("ab", "a long one"))
    assert [matcher.push(token) for token in b"xaby.ab"] == [False, False, True, False, False, False, True]
