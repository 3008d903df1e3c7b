"""The teacher of on-policy distillation: a frozen model that scores what the policy sampled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rljax.backends.torch import model, packing_probe
from rljax.backends.torch.forward import target_logprobs
from rljax.backends.torch.mesh import RankMesh
from rljax.config.schema import Config
from rljax.engines.cuda.config import FsdpConfig
from rljax.engines.cuda.learning.policy import DTYPES
from rljax.engines.cuda.learning.rows import Rows
from rljax.hf.activations import logit_rows
from rljax.hf.other_model import OtherModel
from rljax.hf.read_model import read_model


class Teacher:
    """A sharded model of its own in `actor.dtype`, without master weights and moments.

    Its architecture and size may differ from the policy's.
    """

    def __init__(self, config: Config, directory: Path, rank_mesh: RankMesh) -> None:
        """Loads the model of a directory. Raises UserError if it can't be loaded or sharded so."""
        dtype, compiled = DTYPES[config.actor.dtype], FsdpConfig.of(config).compile and rank_mesh.device.type == "cuda"
        spec = read_model(directory)
        self._network = model.build(spec, directory, rank_mesh, dtype=dtype, base_dtype=dtype, compile=compiled)
        self._network.requires_grad_(False)
        model.read_weights(self._network, directory)
        if isinstance(spec, OtherModel):
            packing_probe.check(self._network, directory, rank_mesh, dtype)
        self._temperature, self._chunk = config.gconfig.temperature, logit_rows(config.actor.logprob_chunk, spec.vocab_size)

    @torch.no_grad()
    def score(self, parts: Iterable[Rows]) -> list[Tensor]:
        """Returns log-probs of the target tokens of each micro-batch, at the sampling temperature.

        [r, m] float32, nats.
        """
        try:
            return [target_logprobs(self._network, rows, temperature=self._temperature, chunk=self._chunk)[0] for rows in parts]
        finally:
            model.reshard(self._network)
