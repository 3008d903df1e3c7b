"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: y = W x + (alpha / rank) B A x with W frozen.

The factors A and B start as on the JAX path, from the same seed: A uniform in +-1/sqrt(inputs), B
zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rljax.backends.torch.mesh import local, local_slices
from rljax.config.checks import check_targets
from rljax.config.schema import LoraConfig
from rljax.hf.adapter import A, B, read_adapter
from rljax.hf.other_model import Model
from rljax.hf.tensors import layer_tensor, projections


def adder(config: LoraConfig) -> Callable[[nn.Module], None]:
    """Returns a function that adds adapters to a model and freezes everything else.

    Raises UserError for an unknown projection.
    """
    check_targets(config.target_modules)

    def add(causal: nn.Module) -> None:
        import peft

        alpha: Any = config.alpha  # peft annotates it as int, but only divides it by the rank
        targets = list(config.target_modules)
        adapters = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
        peft.inject_adapter_in_model(adapters, causal)
        for name, parameter in causal.named_parameters():
            trained = ".lora_" in name
            parameter.requires_grad_(trained)
            if trained:
                parameter.data = parameter.data.float()

    return add


@torch.no_grad()
def initialize(parameters: Mapping[str, DTensor], spec: Model, config: LoraConfig, seed: int) -> None:
    """Fills this rank's shards of the factors.

    They are those of `config.path`, or depend on seed and name only, not on the ranks or the
    framework. Raises UserError for an adapter that can't be gone on from.
    """
    given = read_adapter(config.path, spec, config) if config.path else None
    for projection, (_, inputs, _) in projections(spec).items():
        if projection.split(".")[-1] not in config.target_modules:
            continue
        generator = np.random.default_rng([seed, zlib.crc32(f"{projection}.weight".encode())])
        bound = inputs**-0.5
        stacked = generator.uniform(-bound, bound, (spec.num_layers, inputs, config.rank)).astype(np.float32)
        for layer in range(spec.num_layers):
            a = parameters[layer_tensor(layer, f"{projection}.{A}")]
            b = parameters[layer_tensor(layer, f"{projection}.{B}")]
            if given is None:
                local(a).copy_(torch.from_numpy(np.ascontiguousarray(stacked[layer].T[local_slices(a)])))
                local(b).zero_()
                continue
            for factor, name in ((a, A), (b, B)):
                whole = given[layer_tensor(layer, f"{projection}.{name}")]
                local(factor).copy_(torch.from_numpy(np.ascontiguousarray(whole[local_slices(factor)])))


def merged(name: str, weight: Tensor, whole: Callable[[str], Tensor], parameters: Mapping[str, Any], scale: float) -> Tensor:
    """Returns W + scale B A if the tensor has adapters, else W.

    whole: gathers a parameter by name.
    """
    stem = name.removesuffix("weight")
    if stem + A not in parameters:
        return weight
    return weight + (scale * (whole(stem + B).float() @ whole(stem + A).float())).to(weight.dtype)
