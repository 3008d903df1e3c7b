import pytest

torch = pytest.importorskip("torch", reason="the torch backend needs the extra [torch]")

from rljax.backends.torch import fused, logprobs, losses, objective  # noqa: E402
from rljax.testing.parity_suite import ParitySuite  # noqa: E402


class TestTorchParity(ParitySuite):
    losses = losses
    token_logprobs = staticmethod(logprobs.token_logprobs)
    policy_objective = staticmethod(objective.policy_objective)
    value_objective = staticmethod(objective.value_objective)
    fused_objective = staticmethod(fused.fused_objective)

    def array(self, x, dtype):
        return torch.tensor(x, dtype=getattr(torch, dtype) if x.dtype.kind == "f" else None)

    def numpy(self, x):
        x = x.detach()
        return (x.double() if x.is_floating_point() else x).numpy()

    def gradient(self, function, arrays, *rest):
        leaves = [x.detach().requires_grad_() for x in arrays]
        value = function(*leaves, *rest)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        return value, [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]
