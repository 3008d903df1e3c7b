"""A streamed reply put together again: tokens, log-probs, and the version that made each token.

The version of a token is not simply what the reply says. There are three kinds of servers:

- **exact**: reports spans of versions, and no step straddles a swap (our server; SGLang 0.5.23
  without overlap scheduling). The spans are used as they are.
- **spans, overlapped**: SGLang starts a step before it has seen the tokens of the last one. When
  it pauses, one step has run whose tokens are not counted yet: the first token of each request
  after a swap was made by the weights before it.
- **labels only** (SGLang 0.5.17): a chunk carries the version that the server's front end knew
  when the chunk passed through it. Tokens made before a swap may pass after it, so the first
  chunk under a new label is taken to be older.

If the version can't be known, the older one is used: the lag may be overstated, never understated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.errors import SamplerError, UserError
from rljax.types import Finish

UNNUMBERED = "default"  # SGLang's default label of the weights it started with


def version_of(label: str) -> int:
    """Parses a version label.

    Raises SamplerError if it is no number: the server's weights are not of this run.
    """
    if label == UNNUMBERED:
        return 0
    try:
        return int(label)
    except ValueError:
        raise SamplerError(
            f"a server's weight_version is {label!r}, not a number, so its weights were not published by rljax"
        ) from None


@dataclasses.dataclass
class Reply:
    """The tokens of one attempt at a completion, as far as they have arrived."""

    version_when_sent: int  # version of the weights at that time
    overlapped: bool  # steps of the server may straddle swaps
    prompt_tokens: int | None = None  # that the server has to count, with a picture's tokens; None: not checked
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    _labels: list[int] = dataclasses.field(default_factory=list)
    _label: int | None = None  # label of the last chunk
    _spans: Sequence[Mapping[str, Any]] = ()

    def add(self, chunk: Mapping[str, Any]) -> int:
        """Adds a chunk and returns the number of new tokens.

        A chunk has all tokens so far, or only the new ones. Raises SamplerError if it is malformed.
        """
        try:
            meta = chunk["meta_info"]
            ids, label = chunk["output_ids"], version_of(meta["weight_version"])
            total = int(meta["completion_tokens"]) if "completion_tokens" in meta else len(ids)
            new = total - len(self.token_ids)
            if new < 0 or (new and len(ids) not in (new, total)):
                raise ValueError(f"{len(ids)} token ids in a chunk, {len(self.token_ids)} before it, {total} in all")
            logprobs = meta["output_token_logprobs"] if new else []
            if len(logprobs) < new:
                raise ValueError(f"{len(logprobs)} log-probs for {new} tokens")
            self.token_ids += [int(i) for i in ids[len(ids) - new :]]
            self.logp += [_logp(entry[0]) for entry in logprobs[len(logprobs) - new :]]
            self._take_labels(label, new, meta)
            self._check_prompt(meta)
            if meta["finish_reason"] is not None:
                self.finish = Finish(meta["finish_reason"]["type"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(f"a server's reply is malformed: {type(error).__name__}: {error}") from None
        return new

    def _check_prompt(self, meta: Mapping[str, Any]) -> None:
        """Raises UserError if the server makes another number of tokens of the prompt's pictures."""
        found = meta["prompt_tokens"] if self.prompt_tokens is not None else None
        if found != self.prompt_tokens:
            raise UserError(
                f"pictures: the server sees {found} tokens in a prompt of {self.prompt_tokens}: its processor expands pictures"
                " in another way (rljax compare shows where; the transformers of both should be of one release)"
            )

    def _take_labels(self, label: int, new: int, meta: Mapping[str, Any]) -> None:
        before = self.version_when_sent if self._label is None else self._label
        self._labels += [min(before, label)] * new
        if new:
            self._label = label
        reported = meta.get("weight_versions")  # SGLang sends it in the last chunk only
        if reported:
            whole = reported[0]["start"] == 0
            self._spans = [*([] if whole else self._spans), *reported]

    @property
    def versions(self) -> list[int]:
        """The version of each token."""
        versions = list(self._labels)
        for span in self._spans:
            version, start, end = version_of(span["version"]), int(span["start"]), min(int(span["end"]), len(versions))
            versions[start:end] = [version] * max(0, end - start)
        if not self.overlapped or not self._spans:
            return versions
        return [min(version, before) for version, before in zip(versions, [self.version_when_sent, *versions], strict=False)]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (token_ids [T] int32, logp [T] float32, versions [T] int32)."""
        return (
            np.array(self.token_ids, np.int32),
            np.array(self.logp, np.float32),
            np.array(self.versions, np.int32),
        )


def _logp(value: float | None) -> float:
    return -np.inf if value is None else float(value)
