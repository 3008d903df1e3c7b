"""transformers' model of a directory, sharded by FSDP2 and filled straight from its safetensors.

meta device -> (adapters) -> (tensor parallel) -> fully_shard a layer and the rest -> each rank's
shards read from disk
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from rljax.backends.torch.attention import IMPLEMENTATION
from rljax.backends.torch.mesh import Layout, local, local_slices
from rljax.backends.torch.tensor_parallel import parallelize, vocabulary_group
from rljax.hf.spec import ModelSpec
from rljax.hf.weights import WeightReader

MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)


class Network(nn.Module):
    """A causal language model without its logits: a function of hidden states and unembedding runs
    inside its forward, where FSDP2 has the unembedding whole and in the dtype of computation.

    Example: logp = network(lambda hidden, unembedding: ..., token_ids, positions, segments)
    """

    def __init__(self, causal: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.causal: Any = causal
        self.spec = spec
        self.vocabulary: Any = None  # process group whose ranks hold a shard of the unembedding each; None: it is whole

    def forward(self, function: Callable[[Tensor, Tensor], Any], token_ids: Tensor, positions: Tensor, segments: Any) -> Any:
        """function(hidden [r, T, H] after the final norm, unembedding [V, H] or this rank's shard
        of it).
        """
        out = self.causal.model(input_ids=token_ids, position_ids=positions, use_cache=False, segments=segments)
        weight = self.causal.lm_head.weight
        return function(out.last_hidden_state, weight.to_local() if isinstance(weight, DTensor) else weight)


def build(
    spec: ModelSpec,
    directory: Path | str,
    layout: Layout,
    *,
    dtype: torch.dtype,
    base_dtype: torch.dtype = torch.float32,
    remat: str = "none",
    compile: bool = False,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Network:
    """The network of a model directory on this rank's device, its parameters' contents yet to be
    read (`read_weights`).

    Args:
      dtype: computed in. base_dtype: of the parameters, but for those that `adapt` adds.
      remat: "none"; "full": layers are computed again in the backward pass; "dots": all of them
        but the matrix products.
      compile: layers go through torch.compile, attention apart: norms, rotations and activations
        become few passes over memory. Not with "dots": what is inside a compiled layer can't be
        kept one product at a time.
      adapt: changes the model while it is on the meta device (adds LoRA).
    """
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config, dtype=base_dtype, attn_implementation=IMPLEMENTATION)
    causal.get_input_embeddings().padding_idx = None  # else the embedding of that id gets no gradient
    if adapt is not None:
        adapt(causal)
    network = Network(causal, spec)
    if layout.tensor is not None:
        trained = {name for name, parameter in causal.named_parameters() if parameter.requires_grad}
        parallelize(causal, spec, layout.tensor)
        for name, parameter in causal.named_parameters():  # those that were split are new ones
            parameter.requires_grad_(name in trained)
        network.vocabulary = vocabulary_group(causal, layout.tensor)
    for layer in causal.model.layers:
        compiled = compile and remat != "dots"
        forward = _compiled(layer.forward) if compiled else layer.forward
        layer.forward = _checkpointed(forward, remat, whole=layout.tensor is not None)
    _shard(network, causal.model.layers, layout, dtype)
    network.to_empty(device=layout.device)
    _fill_buffers(causal)
    return network.train()  # there is no dropout in it


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """All layers share what is compiled: once with gradients and once without, and for each length
    of rows.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(forward)


def _checkpointed(forward: Callable[..., Any], remat: str, whole: bool) -> Callable[..., Any]:
    """whole: a layer is computed again to its end. Where that could stop sooner it may be between
    the start of a collective and the wait for it, and torch would keep what was begun (adapters
    beside a layer split over `t`), a few tensors a step.
    """
    if remat == "none":
        return forward
    extra: dict[str, Any] = {"early_stop": not whole}
    if remat == "dots":
        extra |= {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)}
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _keep_products(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(network: Network, layers: nn.ModuleList, layout: Layout, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*layers, network):
        fully_shard(module, mesh=layout.parameters, mp_policy=policy, reshard_after_forward=module is not network)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            # Losses hold the global normalizer: gradients of ranks add up. gloo has no other reduction than a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(network: Network) -> None:
    """Lets go of what a forward pass gathered and no backward pass followed."""
    assert isinstance(network, FSDPModule)
    network.reshard()


def replicate_gradients(network: Network, now: bool) -> None:
    """Whether the next backward pass adds gradients up over the ranks that hold the same shards:
    once a step is enough.
    """
    assert isinstance(network, FSDPModule)
    network.set_requires_all_reduce(now)


def _fill_buffers(causal: Any) -> None:
    """Rotary frequencies and the like, which no file holds."""
    for parameter in causal.parameters():
        parameter._is_hf_initialized = True  # transformers leaves those alone; they are read from files
    for module in causal.modules():
        if any(True for _ in module.buffers(recurse=False)):
            causal._init_weights(module)


def parameters(network: Network) -> Iterator[tuple[str, DTensor]]:
    """Every parameter once, under the name that the HF file has for it; adapters as peft calls
    them.
    """
    for name, parameter in network.causal.named_parameters():
        yield name.replace(".base_layer.", ".").replace(".default.", "."), parameter


def read_weights(network: Network, directory: Path | str) -> None:
    """Fills this rank's shards from the safetensors of a directory.

    Raises UserError where they don't fit the model.
    """
    reader = WeightReader(directory)
    reader.check(network.spec)
    for name, parameter in parameters(network):
        if name in reader.shapes:
            shard = local(parameter)
            array = reader.read(name, local_slices(parameter)).astype(np.float32, copy=False)
            if array.shape != shard.shape:
                raise RuntimeError(f"{name}: this rank's shard is {tuple(shard.shape)}, not {array.shape}")
            shard.copy_(torch.from_numpy(array))
