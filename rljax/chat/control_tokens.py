"""Control tokens of a chat, and text that only looks like them.

A chat template writes control tokens such as `<|im_end|>` as text, and the text of a user may hold
the same characters. Before a template is rendered, `disguise` puts a mark into what looks like one
in such text; `encode` then reads those without a mark as control tokens, and the others as what
they are, plain text. A text without such characters has the same ids as without all this.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rljax.errors import UserError


class ControlTokens:
    """Control tokens of a tokenizer: special ones, and added ones that its template writes."""

    def __init__(self, inner: Any, template: str) -> None:
        """Finds the control tokens.

        Args:
          inner: a tokenizer of transformers.
          template: source of its chat template, or empty.
        """
        self._inner = inner
        tokens = inner.added_tokens_decoder.items()
        self.ids = {t.content: i for i, t in tokens if len(t.content) > 1 and (t.special or _is_written(t.content, template))}
        self._mark = secret()
        longest_first = "|".join(re.escape(token) for token in sorted(self.ids, key=len, reverse=True)) or "(?!)"
        self._tokens = re.compile(longest_first)
        first = "".join(sorted({re.escape(token[0]) for token in self.ids})) or "(?!)"
        self._first = re.compile(f"[{first}]" if self.ids else "(?!)")
        self._starts = re.compile(f"(?=[{first}])(?={longest_first})")
        # What may become a control token together with the text beside it; letters alone are words
        edges = [(token[:k], token[k:]) for token in self.ids for k in range(1, len(token))]
        self._begin = _any_of({left[::-1] for left, _ in edges if not left.isalnum()})  # of a text read backwards
        self._end = _any_of({right for _, right in edges if not right.isalnum()})
        self._longest = max(map(len, self.ids), default=0)
        self._of_short = functools.lru_cache(maxsize=1024)(self._disguise)  # keys and roles, over and over

    def disguise(self, value: Any) -> Any:
        """Marks what looks like a control token, in a text or in all texts of a JSON value."""
        if isinstance(value, str):
            return self._of_short(value) if len(value) < 32 else self._disguise(value)
        if isinstance(value, Mapping):
            return {self.disguise(key): self.disguise(item) for key, item in value.items()}
        return [self.disguise(item) for item in value] if isinstance(value, list | tuple) else value

    def _disguise(self, text: str) -> str:
        core = text.strip()
        if self._end.match(core):
            start = text.index(core)
            text = text[:start] + self._mark + text[start:]
        if self._begin.match(core[-self._longest :][::-1]):
            end = len(text.rstrip())
            text = text[:end] + self._mark + text[end:]
        if self._first.search(text) is None:
            return text
        positions = [match.start() + 1 for match in self._starts.finditer(text)]
        return _insert(text, positions, self._mark) if positions else text

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the ids of a rendered text, without BOS and EOS.

        Args:
          continues: other text stands before this one; where a tokenizer puts a space before the
            first word of a text, this is none.
        """
        if continues and self._opens_with_space:
            newline, ids = self._encode("\n"), self._encode("\n" + text)
            return ids[len(newline) :] if ids[: len(newline)] == newline else self._encode(text)
        return self._encode(text)

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of ids that `encode` gives for each text, faster for many of them."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            return [len(self._encode(text)) for text in texts]
        plain = [i for i, text in enumerate(texts) if self._mark not in text]
        of_plain = dict(zip(plain, self._plain_counts(backend, [texts[i] for i in plain]), strict=True))
        return [of_plain[i] if i in of_plain else len(self._encode(text)) for i, text in enumerate(texts)]

    def _plain_counts(self, backend: Any, texts: Sequence[str]) -> list[int]:
        """Counts texts without marks. What they share at both ends is counted once, with the first.

        A third of a prompt may be a template's system message.
        """
        head, tail = self._shared_ends(texts)
        differing = [text[head : len(text) - tail] for text in texts]
        lengths = [len(ids) for ids in backend.encode_batch_fast(differing, add_special_tokens=False)]
        if not head and not tail:
            return lengths
        ends = [texts[0], texts[0][:head], texts[0][len(texts[0]) - tail :]]
        whole, *shared = [len(ids) for ids in backend.encode_batch_fast(ends, add_special_tokens=False)]
        if whole != lengths[0] + sum(shared):  # a tokenizer that is not known to be
            return [len(ids) for ids in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [length + sum(shared) for length in lengths]

    def _shared_ends(self, texts: Sequence[str]) -> tuple[int, int]:
        """Returns how many characters all texts have in common at both ends, up to a control token.

        A tokenizer takes the tokens of `_firm` out of a text before anything else, so that a text
        is cut where one begins with no change to its ids.
        """
        if len(texts) < 2 or self._firm is None:
            return 0, 0
        common = _common_start(texts)
        head = max((match.start() for match in self._firm.finditer(common)), default=0)
        most = min(map(len, texts)) - head
        common = _common_start([text[: -most - 1 : -1] for text in texts])[::-1] if most else ""
        tail = next((len(common) - match.start() for match in self._firm.finditer(common)), 0)
        return head, tail

    @functools.cached_property
    def _firm(self) -> re.Pattern[str] | None:
        """A pattern of the added tokens that are found whatever stands beside them.

        They are special, taken from the raw text, whatever white space and letters are next to
        them, and do not begin within another added token. None if there is none.
        """
        added = list(self._inner.added_tokens_decoder.values())
        within = {character for token in added for character in token.content[1:]}
        firm = [
            token.content
            for token in added
            if token.special and not (token.normalized or token.lstrip or token.single_word) and token.content[0] not in within
        ]
        longest_first = sorted(firm, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if firm else None

    def with_token(self, texts: Sequence[str], token_id: int) -> list[bool]:
        """Returns whether a token is among the ids of each text, faster for many of them."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None or any(self._mark in text for text in texts):
            return [token_id in self._encode(text) for text in texts]
        return [token_id in found.ids for found in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def find(self, text: str, ids: Collection[int]) -> tuple[int, int] | None:
        """Returns begin and end of the first of some control tokens in a rendered text, or None."""
        return next((match.span() for match in self._tokens.finditer(text) if self.ids[match[0]] in ids), None)

    def breaks(self, text: str) -> Iterator[int]:
        """Yields the positions in a rendered text behind a control token or a line, from the last."""
        found = {match.end() for match in self._tokens.finditer(text)} | {m.end() for m in re.finditer(r"\n+", text)}
        yield from sorted(found, reverse=True)

    def _encode(self, text: str) -> list[int]:
        if self._mark not in text:
            return list(self._inner.encode(text, add_special_tokens=False, verbose=False))
        twin = self._twin
        named = self._tokens.sub(lambda match: twin.names[match[0]], text).replace(self._mark, "")
        ids = twin.tokenizer.encode(named, add_special_tokens=False).ids
        for index in set(ids) & twin.hidden.keys():  # of a vocabulary that knows it as a word too
            raise UserError(
                f"the tokenizer makes the control token {twin.hidden[index]!r} of plain text: leave it out of the text"
                " (or rollout.allow_control_tokens=True)"
            )
        return [twin.ids.get(i, i) for i in ids]

    @functools.cached_property
    def _opens_with_space(self) -> bool:
        return self._encode("\n4")[-1:] != self._encode("4")[-1:] or len(self._encode("4")) > 1

    @functools.cached_property
    def _twin(self) -> _Twin:
        """A copy of the tokenizer in which control tokens have names that no text has."""
        import tokenizers

        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                "the tokenizer has no tokenizer.json, and can't tell control tokens from the same text of a user"
                " (rollout.allow_control_tokens=True reads them as control tokens)"
            )
        nonce = secrets.token_hex(16)
        names = {token: f"control{nonce}{i:08x}x" for i, token in enumerate(self.ids)}
        state = json.loads(backend.to_str())
        of_name = {names.get(added["content"], added["content"]): added["id"] for added in state["added_tokens"]}
        for added in state["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        state.update(post_processor=None, truncation=None, padding=None)  # the first looks for the tokens by name
        twin = tokenizers.Tokenizer.from_str(json.dumps(state))
        ids: dict[int, int] = {twin.token_to_id(name): i for name, i in of_name.items()}  # type: ignore[misc]
        hidden = {i: token for token, i in self.ids.items() if i not in ids and token != self._inner.unk_token}
        return _Twin(twin, names, ids, hidden)


class _Twin(NamedTuple):
    tokenizer: Any
    names: dict[str, str]  # of a control token, in the twin
    ids: dict[int, int]  # the tokenizer's, of the twin's for added tokens
    hidden: dict[int, str]  # control tokens that the twin's vocabulary still has under their own names


def secret() -> str:
    """Returns a text that no dataset and no tool can have, for it is drawn anew in every process.

    It has digits alone, which a template neither escapes nor writes in other letters.
    """
    return str(10**39 + secrets.randbelow(10**39))


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern of any of these texts."""
    return re.compile("|".join(map(re.escape, sorted(texts))) or "(?!)")


def _is_written(token: str, template: str) -> bool:
    """Returns whether a template writes a token that is no special one, such as <think> or [/INST]."""
    return token[0] in "<[" and token[-1] in ">]" and token in template


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: next((i for i, character in enumerate(first) if character != last[i]), len(first))]


def _insert(text: str, positions: Sequence[int], mark: str) -> str:
    parts = [text[a:b] for a, b in zip([0, *positions], [*positions, len(text)], strict=True)]
    return mark.join(parts)
