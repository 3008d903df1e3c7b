"""Loads transformers' model of a directory, sharded by FSDP2 and filled from its safetensors.

meta device -> (adapters) -> (tensor parallel) -> fully_shard per layer, and the rest
            -> each rank reads its shards from disk
"""

from __future__ import annotations

import dataclasses
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
from rljax.backends.torch.mesh import RankMesh, local, local_slices
from rljax.backends.torch.tensor_parallel import parallelize, vocabulary_group
from rljax.backends.torch.vision import VisionTower
from rljax.errors import UserError
from rljax.hf.other_model import Model, OtherModel
from rljax.hf.spec import takes_pictures
from rljax.hf.tensors import tensors
from rljax.hf.weights import WeightReader

MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The pictures of a micro-batch."""

    urls: tuple[str, ...]  # data URLs, row after row
    at: Tensor  # [r, T] bool: the tokens that stand for them


class Network(nn.Module):
    """A causal language model without its logits.

    Its forward runs a function of hidden states and unembedding, inside which FSDP2 has the whole
    unembedding in the compute dtype.

    Example: logp = network(lambda hidden, unembedding: ..., token_ids, positions, segments)
    """

    def __init__(self, causal: Any, spec: Model) -> None:
        super().__init__()
        self.causal: Any = causal
        self.spec = spec
        self.vocabulary: Any = None  # process group over which the unembedding is sharded; None if it is whole
        self.vision: VisionTower | None = None  # of an image-text model

    def forward(
        self,
        function: Callable[[Tensor, Tensor], Any],
        token_ids: Tensor,
        positions: Tensor,
        segments: Any,
        pictures: Pictures | None = None,
    ) -> Any:
        """Returns function(hidden, unembedding).

        hidden: [r, T, H], after the final norm. unembedding: [V, H], or this rank's shard of it.
        """
        given: dict[str, Tensor] = {"input_ids": token_ids}
        if pictures is not None:
            given = {"inputs_embeds": self._embedded(token_ids, pictures)}
        out = self.causal.base_model(**given, position_ids=positions, use_cache=False, segments=segments)
        weight = self.causal.get_output_embeddings().weight
        return function(out.last_hidden_state, weight.to_local() if isinstance(weight, DTensor) else weight)

    def _embedded(self, token_ids: Tensor, pictures: Pictures) -> Tensor:
        """Embeds the tokens, [r, T, H], and puts the features of pictures in the place of theirs.

        Raises UserError if the pictures have another number of features than of tokens.
        """
        if self.vision is None:
            raise UserError("pictures: the prompts have some, and a model of the run takes text alone (actor.distill.teacher?)")
        embedded: Tensor = self.causal.model.embed_tokens(token_ids)
        features = self.vision.features(pictures.urls).to(embedded.dtype)
        if int(pictures.at.sum()) != len(features):
            raise UserError(
                f"pictures: {int(pictures.at.sum())} tokens stand for {len(features)} features of {len(pictures.urls)} pictures"
                " (the workflow has to hand the trajectory all pictures of its prompt)"
            )
        return embedded.masked_scatter(pictures.at[..., None], features)


def build(
    spec: Model,
    directory: Path | str,
    rank_mesh: RankMesh,
    *,
    dtype: torch.dtype,
    base_dtype: torch.dtype = torch.float32,
    remat: str = "none",
    compile: bool = False,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Network:
    """Builds the network of a model directory on this rank's device; `read_weights` fills it.

    Args:
      dtype: dtype of computation.
      base_dtype: dtype of the parameters, except those that `adapt` adds.
      remat: "none"; "full": layers are recomputed in the backward pass; "dots": all but their
        matrix products are.
      compile: compile layers by torch.compile (not attention), so that norms, rotations and
        activations take fewer passes over memory. Ignored with "dots": single products inside a
        compiled layer can't be kept.
      adapt: changes the model while it is on the meta device (adds LoRA).
    """
    causal, layers = _on_meta_device(spec, directory, base_dtype)
    causal.get_input_embeddings().padding_idx = None  # or the embedding of that id would get no gradient
    if adapt is not None:
        with torch.device("meta"):
            adapt(causal)
    network = Network(causal, spec)
    if rank_mesh.tensor_mesh is not None:
        trained = {name for name, parameter in causal.named_parameters() if parameter.requires_grad}
        parallelize(causal, spec, rank_mesh.tensor_mesh)
        for name, parameter in causal.named_parameters():  # splitting made new parameters
            parameter.requires_grad_(name in trained)
        network.vocabulary = vocabulary_group(causal, rank_mesh.tensor_mesh)
    compiled = compile and remat != "dots" and not isinstance(spec, OtherModel)  # others are not tried under torch.compile
    for layer in layers:
        forward = _compiled(layer.forward) if compiled else layer.forward
        layer.forward = _checkpointed(forward, remat, whole=rank_mesh.tensor_mesh is not None)
    _shard(network, layers, rank_mesh, dtype)
    network.to_empty(device=rank_mesh.device)
    _fill_buffers(causal)
    if takes_pictures(directory):
        network.vision = VisionTower(directory, dtype, rank_mesh.device)
    return network.eval()  # without dropout, as the sampler


def _on_meta_device(spec: Model, directory: Path | str, dtype: torch.dtype) -> tuple[Any, nn.ModuleList]:
    """Makes transformers' model of a directory and finds its layers.

    Raises UserError for a family that transformers has no causal model of, or none that leaves
    attention to `packed_attention`.
    """
    try:
        config = AutoConfig.from_pretrained(directory)
        if takes_pictures(directory):
            config = config.text_config
            config.tie_word_embeddings = spec.to_config()["tie_word_embeddings"]
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except (ValueError, KeyError, ImportError) as error:
        line = str(error).split("\n")[0]
        raise UserError(f"{directory}: transformers makes no model of {spec.architecture!r} for fsdp: {line}") from None
    lists = (module for module in causal.base_model.modules() if isinstance(module, nn.ModuleList))
    layers = next((found for found in lists if len(found) == spec.num_layers), None)
    if layers is None or not isinstance(causal.get_output_embeddings(), nn.Linear):
        raise UserError(f"{directory}: {type(causal).__name__} has no list of its layers, or no unembedding, that fsdp finds")
    if causal.get_output_embeddings().bias is not None:
        raise UserError(f"{directory}: {type(causal).__name__} has a bias at its logits, which is not implemented")
    return causal, layers


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a layer. Layers share the result: one per row length, with gradients and without."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(forward)


def _checkpointed(forward: Callable[..., Any], remat: str, whole: bool) -> Callable[..., Any]:
    """Recomputes a layer in the backward pass, as `remat` says.

    Args:
      whole: recompute the layer to its end. An early stop may fall between the start of a
        collective and the wait for it (adapters in a layer split over `t`); torch would then keep
        its buffers, a few tensors per step.
    """
    if remat == "none":
        return forward
    extra: dict[str, Any] = {"early_stop": not whole}
    if remat == "dots":
        extra |= {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)}
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **extra)


def _keep_products(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(network: Network, layers: nn.ModuleList, rank_mesh: RankMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*layers, network):
        fully_shard(module, mesh=rank_mesh.parameter_mesh, mp_policy=policy, reshard_after_forward=module is not network)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            # Losses include the global normalizer, so gradients of ranks are summed. gloo has a plain sum only.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(network: Network) -> None:
    """Frees what a forward pass without a backward pass has gathered."""
    assert isinstance(network, FSDPModule)
    network.reshard()


def replicate_gradients(network: Network, now: bool) -> None:
    """Sets whether the next backward pass sums gradients over the ranks with the same shards.

    Once per step is enough.
    """
    assert isinstance(network, FSDPModule)
    network.set_requires_all_reduce(now)


def _fill_buffers(causal: Any) -> None:
    """Computes rotary frequencies and other buffers that are in no file.

    Raises UserError for one that transformers computes only where the model is made, or not there.
    """
    name_of_class = type(causal).__name__
    for parameter in causal.parameters():
        parameter._is_hf_initialized = True  # transformers leaves parameters with this flag alone; they are read from files
    for module in causal.modules():
        computed = []
        for before in (0, 1):
            for buffer in module.buffers(recurse=False):
                buffer.fill_(before)
            if any(True for _ in module.buffers(recurse=False)):
                try:
                    causal._init_weights(module)
                except Exception as error:  # code of each family
                    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
                    raise UserError(f"actor.path: transformers fails to fill the buffers of {name_of_class}: {line}") from error
            computed.append({name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)})
        for name, buffer in computed[0].items():
            if not torch.equal(buffer, computed[1][name]):
                raise UserError(f"actor.path: {name_of_class} has a buffer {name!r} that fsdp can't compute again")


def parameters(network: Network) -> Iterator[tuple[str, DTensor]]:
    """Yields each parameter once, under its HF name; adapters under peft's names."""
    for name, parameter in network.causal.named_parameters():
        yield name.replace(".base_layer.", ".").replace(".default.", "."), parameter


def read_weights(network: Network, directory: Path | str) -> None:
    """Fills this rank's shards from the safetensors of a directory.

    Raises UserError if they don't fit the model.
    """
    reader = WeightReader(directory)
    reader.check(network.spec)
    _compare(network, directory)
    for name, parameter in parameters(network):
        if name in reader.shapes:
            shard = local(parameter)
            array = reader.read(name, local_slices(parameter)).astype(np.float32, copy=False)
            if array.shape != shard.shape:
                raise RuntimeError(f"{name}: this rank's shard is {tuple(shard.shape)}, not {array.shape}")
            shard.copy_(torch.from_numpy(array))


def _compare(network: Network, directory: Path | str) -> None:
    """Raises UserError unless the directory's tensors are transformers' parameters, name by name."""
    stored = tensors(network.spec)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters(network) if ".lora_" not in name}
    for name in stored.keys() | shapes.keys():
        if stored.get(name) != shapes.get(name):
            there, here = (list(each[name]) if name in each else "missing" for each in (stored, shapes))
            kind = type(network.causal).__name__
            raise UserError(f"{directory}: tensor {name!r} is {there} in the files, and {here} in transformers' {kind}")
