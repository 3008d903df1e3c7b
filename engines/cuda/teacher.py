"""The teacher of on-policy distillation: a frozen model of another directory that scores what the
policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rljax.backends.torch import model
from rljax.backends.torch.forward import named_logprobs
from rljax.backends.torch.mesh import Layout
from rljax.config.schema import Config
from rljax.engines.cuda.config import FsdpConfig
from rljax.engines.cuda.policy import DTYPES
from rljax.engines.cuda.rows import Rows
from rljax.hf.spec import ModelSpec


class Teacher:
    """A sharded module of its own in `actor.dtype`, with no master weights and no moments.

    Its shape may be any.
    """

    def __init__(self, config: Config, directory: Path, layout: Layout) -> None:
        """Raises UserError where the directory's model can't be loaded, or not in this layout."""
        dtype, compiled = DTYPES[config.actor.dtype], FsdpConfig.of(config).compile and layout.device.type == "cuda"
        spec = ModelSpec.from_directory(directory)
        self._network = model.build(spec, directory, layout, dtype=dtype, base_dtype=dtype, compile=compiled)
        self._network.requires_grad_(False)
        model.read_weights(self._network, directory)
        self._temperature, self._chunk = config.gconfig.temperature, config.actor.logprob_chunk

    @torch.no_grad()
    def score(self, parts: Iterable[Rows]) -> list[Tensor]:
        """[r, m] float32, nats, of every micro-batch: log-probs of the named tokens at the
        sampling temperature.
        """
        try:
            return [named_logprobs(self._network, rows, temperature=self._temperature, chunk=self._chunk)[0] for rows in parts]
        finally:
            model.reshard(self._network)
