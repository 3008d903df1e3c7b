"""Samples from the bigram table token by token, with faults and delays on request.

Between two tokens other tasks of the event loop get their turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np

from rljax.config.schema import Config
from rljax.engine import CooperativeSampler, WeightsInDirectory, WeightsInMemory, WeightSource
from rljax.engines.fake import model
from rljax.errors import SamplerError, UserError
from rljax.types import Completion, Finish, Request


@dataclasses.dataclass
class Trouble:
    """Injected delays and faults.

    They have a random generator of their own, so that a completion stays a function of its request.

    Example: Trouble(np.random.default_rng(0), delay=0.002, failure_rate=0.05)
    """

    random: np.random.Generator
    delay: float = 0.0  # longest delay before a token, in seconds
    failure_rate: float = 0.0  # share of requests that are lost, at a random token

    async def before_token(self) -> None:
        if self.delay:
            await asyncio.sleep(self.random.uniform(0, self.delay))

    def lost_at(self, request: Request) -> int:
        """Returns the index of the token at which the request is lost; past the end if it isn't."""
        lost = self.random.random() < self.failure_rate
        return int(self.random.integers(request.params.max_new_tokens)) if lost else request.params.max_new_tokens


class FakeSampler(CooperativeSampler):
    """A sampler of the table, on one event loop; weights are swapped between two tokens."""

    def __init__(self, config: Config, model_dir: Path, trouble: Trouble | None = None) -> None:
        super().__init__()
        self._table = model.read(model_dir)
        self._by_temperature: dict[float, np.ndarray] = {}  # log-probs of the present weights
        self._trouble = trouble or Trouble(np.random.default_rng(config.seed))

    async def generate(self, request: Request) -> Completion:
        """Samples one completion. Raises SamplerError if a fault loses it or the sampler is closed."""
        self.begin(request)
        params, random, last = request.params, np.random.default_rng(request.seed), int(request.prompt_ids[-1])
        tokens: list[int] = []
        logps: list[float] = []
        versions: list[int] = []
        lost_at, finish = self._trouble.lost_at(request), Finish.LENGTH
        while len(tokens) < params.max_new_tokens:
            await self._trouble.before_token()
            if not await self.turn():
                finish = Finish.ABORT
                break
            if len(tokens) == lost_at:
                raise SamplerError(f"request {request.id} was lost at token {lost_at}")
            row = self._row(last, request, len(tokens))
            last = int(row.argmax()) if params.greedy else _draw(row, random.random())
            tokens.append(last)
            logps.append(row[last])
            versions.append(self.version)  # read in the same turn of the event loop as the weights
            if last in params.stop_token_ids:
                finish = Finish.STOP
                break
        return Completion(np.array(tokens, np.int32), np.array(logps, np.float32), np.array(versions, np.int32), finish)

    def _row(self, last: int, request: Request, length: int) -> np.ndarray:
        """Returns log-probs of the next token under the distribution that is sampled.

        [V] float64, nats.
        """
        params = request.params
        temperature = 1.0 if params.greedy else params.temperature
        if temperature not in self._by_temperature:
            self._by_temperature[temperature] = model.log_probs(self._table, temperature)
        row = self._by_temperature[temperature][last]
        if length < params.min_new_tokens:
            row = row.copy()
            row[list(params.stop_token_ids)] = -np.inf
            row -= np.log(np.exp(row).sum())
        return row

    async def load_weights(self, source: WeightSource, version: int) -> None:
        match source:
            case WeightsInMemory(table):
                pass
            case WeightsInDirectory(directory):
                table = await asyncio.to_thread(model.read, directory)
            case _:
                raise UserError("the engine fake takes weights from memory or from a directory")
        self._table, self.version, self._by_temperature = table, version, {}


def _draw(row: np.ndarray, uniform: float) -> int:
    """Returns the token at a quantile of the distribution."""
    cumulative = np.cumsum(np.exp(row))
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(row) - 1)
