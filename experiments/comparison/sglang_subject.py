"""SGLang in experiments.compare: a server of our own, or the running one at rollout.addr."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import numpy as np

from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.launcher import SglangServers
from rljax.engines.http.plugin import attach, sampler_of, token_for
from rljax.engines.http.remote import Remote, base_url, inspect, make_session
from rljax.errors import UserError
from rljax.experiments.comparison.case import Case, Greedy
from rljax.experiments.comparison.sampling import complete
from rljax.hf.tokenizer import load_tokenizer

TIMEOUT = 600.0  # seconds for a request
AT_ONCE = 16  # requests that score


class SglangSubject:
    """Implements `Subject`; the layers of a server can't be seen."""

    def __init__(self, case: Case) -> None:
        """Starts the server, unless there is one. Raises UserError."""
        case = dataclasses.replace(case, config=config_io.changed(case.config, [("sglang.dtype", case.dtype)]))
        self._case = case
        self._servers: SglangServers | None = None
        self._tokenizer = load_tokenizer(case.model_dir)
        if case.config.rollout.addr:
            base = base_url(case.config.rollout.addr)
            token = token_for(base)
            info, _ = inspect(base, token)
            if info.ours:
                raise UserError(f"rollout.addr: {base} is a server of rljax, not of SGLang (compare jax instead)")
            self._remote = Remote(base, info, token)
        else:
            self._servers = SglangServers(case.config, Pool("sglang"), case.model_dir)
            self._remote = self._servers.remotes[0]

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Greedy]:
        if self._case.pictures is not None:
            answers = self._answers([picture.token_ids for picture in self._case.pictures], self._case.max_new_tokens)
            return [_completed(answer["meta_info"]["output_token_logprobs"]) for answer in answers]

        async def all_of_them() -> list[Greedy]:
            sampler = self._sampler()
            try:
                return await complete(sampler, prompts, self._case)
            finally:
                await sampler.close()

        return asyncio.run(all_of_them())

    def _sampler(self) -> HttpSampler:
        return sampler_of(self._case.config, [self._remote], 0) if self._servers else attach(self._case.config)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        scored = [answer["meta_info"]["input_token_logprobs"] for answer in self._answers(sequences, 1)]
        for uid, tokens, sequence in zip(self._case.uids, scored, sequences, strict=True):
            if len(tokens) != len(sequence):  # only with pictures, where the server makes the ids from text
                raise UserError(f"prompt {uid}: sglang reads {len(tokens)} tokens where transformers reads {len(sequence)}")
        return [np.array([0.0, *(logp for logp, *_ in tokens[1:])]) for tokens in scored]

    def _answers(self, inputs: Sequence[np.ndarray], max_new_tokens: int) -> list[dict[str, Any]]:
        """Asks for greedy completions of each prompt, and for the log-probs of its own tokens."""

        async def all_of_them() -> list[dict[str, Any]]:
            room = asyncio.Semaphore(AT_ONCE)
            async with make_session() as session:
                return await asyncio.gather(
                    *(self._answer(session, room, i, max_new_tokens, ids) for i, ids in enumerate(inputs))
                )

        return asyncio.run(all_of_them())

    async def _answer(
        self, session: aiohttp.ClientSession, room: asyncio.Semaphore, index: int, max_new_tokens: int, token_ids: np.ndarray
    ) -> dict[str, Any]:
        stops = list(self._case.stop_token_ids)
        body: dict[str, Any] = self._prompt(index, token_ids) | {
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "stop_token_ids": stops},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with room:
            answer = await self._remote.post(session, "/generate", body, TIMEOUT)
        return cast(dict[str, Any], answer)

    def _prompt(self, index: int, token_ids: np.ndarray) -> dict[str, Any]:
        """Returns ids; of a prompt with pictures the text, of which the server makes the ids."""
        if self._case.pictures is None:
            return {"input_ids": token_ids.tolist()}
        picture = self._case.pictures[index]
        completion = self._tokenizer.decode(token_ids[len(picture.token_ids) :], skip_special_tokens=False)
        return {"text": picture.text + completion, "image_data": list(picture.urls)}

    def hidden_states(self, sequence: np.ndarray) -> None:
        return None

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()


def _completed(scored: Sequence[Any]) -> Greedy:
    """Converts SGLang's list of (log-prob, id, text)."""
    return Greedy(np.array([token for _, token, *_ in scored], np.int32), np.array([logp for logp, *_ in scored]))
