"""The torch rows of experiments.bench.logprobs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rljax.backends.torch.fused import fused_objective
from rljax.backends.torch.logprobs import token_logprobs
from rljax.backends.torch.objective import policy_objective
from rljax.experiments.bench.logprobs_case import Case, Outcome, Variant
from rljax.objective.spec import TokenArrays

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Function = Callable[[Tensor, Tensor, Tensor, TokenArrays, Case], tuple[Tensor, Tensor | None]]  # loss, logp


def device() -> str:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    return f"torch {torch.__version__}, {name}"


class TorchVariant(Variant):
    def __init__(self, name: str, function: Function, exact: bool = True):
        self.name, self.function, self.exact = name, function, exact

    def check(self, case: Case) -> Outcome:
        hidden, unembedding, labels, tokens = _on_device(case)
        loss, logp = self.function(hidden, unembedding, labels, tokens, case)
        loss.backward()
        grads = [x.double().cpu().numpy() for x in (hidden.grad, unembedding.grad) if x is not None]
        return Outcome(None if logp is None else logp.detach().double().cpu().numpy(), *grads)

    def measure(self, case: Case, repeats: int) -> tuple[float, float | None]:
        hidden, unembedding, labels, tokens = _on_device(case)

        def call() -> None:
            hidden.grad = unembedding.grad = None
            self.function(hidden, unembedding, labels, tokens, case)[0].backward()

        for _ in range(3):
            call()
        if DEVICE.type == "cpu":
            return float(np.median([_wall_clock(call) for _ in range(repeats)])), None
        hidden.grad = unembedding.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        gradients = hidden.nbytes + unembedding.nbytes
        workspace = torch.cuda.max_memory_allocated() - before - gradients
        seconds = float(np.median([_events(call) for _ in range(repeats)]))
        return seconds, float(workspace)


def variants() -> Sequence[Variant]:
    rows = [
        TorchVariant("torch ours, fused (6MHV)", _fused),
        TorchVariant("torch ours, recomputed (8MHV)", _recomputed),
        TorchVariant("torch plain", functools.partial(_plain, chunk=None, compiled=False)),
        TorchVariant("torch.compile, one chunk", functools.partial(_plain, chunk=None, compiled=True)),
        TorchVariant("torch.compile, checkpointed 1024", functools.partial(_plain, chunk=1024, compiled=True)),
    ]
    if DEVICE.type == "cuda":
        rows += [
            TorchVariant("torch ours, fused, float32 sum", functools.partial(_fused, accumulator=torch.float32)),
            TorchVariant("Liger GRPO (no entropy, no weight)", _liger_grpo, exact=False),
            TorchVariant("Liger cross entropy (log-prob only)", _liger_cross_entropy, exact=False),
        ]
    return rows


def _fused(
    hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, case: Case, accumulator: Any = None
) -> Any:
    static: dict[str, Any] = dict(temperature=case.temperature, softcap=case.softcap, chunk=case.chunk, accumulator=accumulator)
    return fused_objective(hidden, unembedding, labels, tokens, case.objective, **static)[0], None


def _recomputed(hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, case: Case) -> Any:
    static: dict[str, Any] = dict(temperature=case.temperature, softcap=case.softcap, chunk=case.chunk)
    logp, entropy = token_logprobs(hidden, unembedding, labels, **static)
    return policy_objective(logp[None], entropy[None], tokens, case.objective)[0], logp


def _plain(
    hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, case: Case, chunk: int | None, compiled: bool
) -> Any:
    """Computes the loss without the op: logits, log-softmax, gather.

    With `chunk` it works in chunks that are computed again in the backward pass.
    """
    scores = _compiled_scores() if compiled else _scores
    static = (case.temperature, case.softcap)
    if chunk is None:
        logp, entropy = scores(hidden, unembedding, labels, *static)
    else:
        parts = [
            checkpoint(scores, rows, unembedding, some, *static, use_reentrant=False)
            for rows, some in zip(hidden.split(chunk), labels.split(chunk), strict=True)
        ]
        logp, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return policy_objective(logp[None], entropy[None], tokens, case.objective)[0], logp


def _scores(
    hidden: Tensor, unembedding: Tensor, labels: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ unembedding.T).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@functools.cache
def _compiled_scores() -> Callable[..., Any]:
    return torch.compile(_scores)


def _liger_grpo(hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, case: Case) -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = min(1024, len(labels))
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", temperature=case.temperature)
    by_sequence = hidden.view(-1, length, hidden.shape[1])
    shaped = [x.view(-1, length) for x in (labels, tokens.mask[0].long(), tokens.advantage[0], tokens.proximal_logp[0])]
    return loss(by_sequence, unembedding, shaped[0], shaped[1], shaped[2][:, 0].contiguous(), old_per_token_logps=shaped[3])[
        0
    ], None


def _liger_cross_entropy(hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, case: Case) -> Any:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(unembedding, hidden, labels), None


def _on_device(case: Case) -> tuple[Tensor, Tensor, Tensor, TokenArrays]:
    def put(x: np.ndarray) -> Tensor:
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).to(DEVICE, copy=True).view(torch.bfloat16)
        return torch.from_numpy(x).to(DEVICE, copy=True)

    tokens = TokenArrays(*(x if x is None else put(x) for x in case.tokens))
    hidden, unembedding = (put(x).requires_grad_() for x in (case.hidden, case.unembedding))
    return hidden, unembedding, put(case.labels).long(), tokens


def _events(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _wall_clock(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
