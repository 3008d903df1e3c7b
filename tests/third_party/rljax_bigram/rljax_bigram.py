"""The engine `bigram`: samples each token from a table, given the last one alone."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from rljax.config.keys import UNIT, key
from rljax.config.schema import Config, EngineConfig
from rljax.engine import CooperativeSampler, Plugin, WeightsInDirectory, WeightSource
from rljax.errors import UserError
from rljax.types import Completion, Finish, Request


@dataclasses.dataclass(frozen=True)
class BigramConfig(EngineConfig):
    uniform: float = key(0.0, "Share of the uniform distribution in what is sampled from.", UNIT)


class BigramSampler(CooperativeSampler):
    def __init__(self, config: Config, model_dir: Path) -> None:
        super().__init__()
        self._uniform, self._table = BigramConfig.of(config).uniform, read_table(model_dir)

    async def generate(self, request: Request) -> Completion:
        self.begin(request)
        params, random, token = request.params, np.random.default_rng(request.seed), request.prompt_ids[-1]
        tokens, logps, versions, finish = [], [], [], Finish.LENGTH
        while len(tokens) < params.max_new_tokens and finish is Finish.LENGTH:
            if not await self.turn():
                finish = Finish.ABORT
                break
            logits = self._table[token] / (1.0 if params.greedy else params.temperature)
            p = np.exp(logits - logits.max())
            p = (1 - self._uniform) * p / p.sum() + self._uniform / len(p)
            if len(tokens) < params.min_new_tokens:
                p[list(params.stop_token_ids)] = 0
            p /= p.sum()
            token = int(p.argmax() if params.greedy else random.choice(len(p), p=p))
            tokens.append(token)
            logps.append(np.log(p[token]))
            versions.append(self.version)
            if token in params.stop_token_ids:
                finish = Finish.STOP
        return Completion(np.array(tokens, np.int32), np.array(logps, np.float32), np.array(versions, np.int32), finish)

    async def load_weights(self, source: WeightSource, version: int) -> None:
        if not isinstance(source, WeightsInDirectory):
            raise UserError("the engine bigram takes weights from directories alone")
        self._table, self.version = read_table(source.directory), version


def read_table(directory: Path) -> np.ndarray:
    """Logits of the next token [V, V], a row per last token; zeros before there is a table."""
    config, table = directory / "config.json", directory / "bigram.safetensors"
    if not config.is_file():
        raise UserError(f"{directory}: no config.json (a model directory has one)")
    size = json.loads(config.read_text())["vocab_size"]
    return load_file(table)["table"].astype(np.float64) if table.is_file() else np.zeros((size, size))


class BigramPlugin(Plugin):
    samples, config_class = True, BigramConfig

    def check(self, config, allocation):
        drawn = (config.gconfig, config.evaluator)
        if config.gconfig.stop or any(params.top_p < 1 or params.top_k for params in drawn):
            raise UserError("allocation_mode: the engine bigram has no stop, top_p or top_k (leave them out)")

    def make_sampler(self, config, pool, model_dir):
        return BigramSampler(config, model_dir)


PLUGIN = BigramPlugin()
