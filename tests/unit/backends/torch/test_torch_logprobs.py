"""The torch op beyond the parity suite: vocabulary shards, torch.compile, backward, memory."""

import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch backend needs the extra [torch]")

from rljax.backends.torch import losses  # noqa: E402
from rljax.backends.torch.fused import fused_objective  # noqa: E402
from rljax.backends.torch.logprobs import d_logits, token_logprobs  # noqa: E402
from rljax.backends.torch.objective import policy_objective  # noqa: E402
from rljax.objective.spec import Objective, TokenArrays  # noqa: E402
from rljax.testing.parity_cases import TERMS, inputs  # noqa: E402

OBJECTIVE = Objective(clip_high=0.28, dual_clip=3.0, weight_cap=2.0, kl_coef=0.1, entropy_coef=0.2)


def case(rows=4, width=5, hidden_size=8, vocabulary=304):
    random = np.random.default_rng(0)

    def normal(mean, std, *shape):
        return torch.tensor(random.normal(mean, std, shape))

    hidden, unembedding = normal(0, 1, rows * width, hidden_size), normal(0, 1, vocabulary, hidden_size)
    labels = torch.tensor(random.integers(0, vocabulary, rows * width))
    tokens = TokenArrays(
        normal(0, 1, rows, width).abs(),
        torch.tensor(random.random((rows, width)) < 0.8),
        normal(0, 1, rows, width),
        normal(-5, 0.3, rows, width),
        torch.ones(rows, width, dtype=torch.long),
        proximal_logp=normal(-5, 0.3, rows, width),
        reference_logp=normal(-5, 0.3, rows, width),
    )
    return hidden, unembedding, labels, tokens


def both(hidden, unembedding, labels, tokens, group=None):
    """Returns loss and gradients, unfused and fused."""
    results = []
    static = dict(temperature=0.7, softcap=3.0, chunk=3, group=group)
    for fused in (False, True):
        leaves = hidden.clone().requires_grad_(), unembedding.clone().requires_grad_()
        if fused:
            loss, _ = fused_objective(*leaves, labels, tokens, OBJECTIVE, **static)
        else:
            logp, entropy = token_logprobs(*leaves, labels, **static)
            shape = tokens.mask.shape
            loss, _ = policy_objective(logp.reshape(shape), entropy.reshape(shape), tokens, OBJECTIVE)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    return results


def _rank(rank, world, port):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    hidden, unembedding, labels, tokens = case()
    whole = both(hidden, unembedding, labels, tokens)
    shard = len(unembedding) // world
    mine = slice(rank * shard, (rank + 1) * shard)
    for got, expected in zip(both(hidden, unembedding[mine], labels, tokens, dist.group.WORLD), whole, strict=True):
        for ours, exact in zip(got, (*expected[:2], expected[2][mine]), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-13)
    dist.destroy_process_group()


def test_a_vocabulary_sharded_over_two_ranks_gives_the_numbers_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(2, port), nprocs=2)


@pytest.mark.parametrize("name, static", TERMS, ids=str)
def test_terms_compile_without_a_graph_break(name, static):
    import inspect

    arrays = {key: torch.tensor(x) for key, x in inputs("stale").items()}
    arguments = list(inspect.signature(getattr(losses, name)).parameters)[: -len(static) or None]
    values = [arrays[a] for a in arguments]
    compiled = torch.compile(getattr(losses, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*values, **static).sum, getattr(losses, name)(*values, **static).sum, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("objective", [OBJECTIVE, Objective(ratio_level="sequence", cap_level="sequence", weight_cap=2.0)])
def test_the_objective_compiles_without_a_graph_break(objective):
    _, _, _, tokens = case()
    logp, entropy = tokens.proximal_logp + 0.1, tokens.proximal_logp.abs()
    compiled = torch.compile(policy_objective, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (policy_objective, compiled):
        leaf = logp.clone().requires_grad_()
        loss, metrics = function(leaf, entropy, tokens, objective)
        gradients.append((*torch.autograd.grad(loss, leaf), loss, *(mean.sum for mean in metrics.values())))
    for ours, exact in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-14)


def test_the_fused_gradients_may_be_used_once():
    hidden, unembedding, labels, tokens = case()
    leaf = hidden.requires_grad_()
    loss, _ = fused_objective(leaf, unembedding, labels, tokens, OBJECTIVE)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


def test_the_fused_gradients_scale_with_that_of_the_loss():
    hidden, unembedding, labels, tokens = case()
    grads = []
    for scale in (1.0, -2.5):
        leaf = unembedding.clone().requires_grad_()
        (fused_objective(hidden, leaf, labels, tokens, OBJECTIVE)[0] * scale).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], -2.5 * grads[0])


def test_no_gradient_is_computed_where_none_is_wanted():
    hidden, unembedding, labels, tokens = case()
    loss, _ = fused_objective(hidden, unembedding, labels, tokens, OBJECTIVE)
    with torch.no_grad():
        same, _ = fused_objective(hidden.requires_grad_(), unembedding, labels, tokens, OBJECTIVE)
    assert not loss.requires_grad and not same.requires_grad and loss == same


def test_an_accumulator_of_float32_rounds_once():
    """A float32 sum over bfloat16 chunks of one row is nearer the exact one."""
    hidden, unembedding, labels, tokens = case(rows=16)
    half = hidden.bfloat16(), unembedding.bfloat16()
    exact = both(half[0].double(), half[1].double(), labels, tokens)[1][2]
    errors = []
    for accumulator in (None, torch.float32):
        leaf = half[1].clone().requires_grad_()
        loss, _ = fused_objective(
            half[0], leaf, labels, tokens, OBJECTIVE, temperature=0.7, softcap=3.0, chunk=1, accumulator=accumulator
        )
        loss.backward()
        errors.append(float((leaf.grad.double() - exact).norm() / exact.norm()))
    assert errors[1] < errors[0]
    assert errors[1] < 2**-8


def test_logits_of_a_whole_batch_are_never_held():
    """Counts the elements of every tensor that an operator makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x.ndim == 2:
                    largest = max(largest, x.numel())
            return out

    hidden, unembedding, labels, tokens = case(rows=12, vocabulary=2048, hidden_size=4)
    with Watch():
        both(hidden, unembedding, labels, tokens)
    assert largest <= max(3 * 2048, 128 * 60, unembedding.numel()) < 60 * 2048 / 10


def test_tokens_of_advantage_0_take_no_gradient_matmul(monkeypatch):
    """Rows with an advantage, padded to eighths of all, take it."""
    rows = []
    monkeypatch.setattr("rljax.backends.torch.fused.d_logits", lambda x, *rest: rows.append(len(x)) or d_logits(x, *rest))
    hidden, unembedding, labels, tokens = case(rows=8, width=10)
    tokens = tokens._replace(mask=torch.ones_like(tokens.mask), advantage=torch.arange(80).reshape(8, 10) % 5 == 0)
    for objective, taken in ((Objective(), 20), (Objective(kl_coef=0.1), 80)):
        rows.clear()
        fused_objective(hidden.requires_grad_(), unembedding, labels, tokens, objective, chunk=7)
        assert sum(rows) == taken
