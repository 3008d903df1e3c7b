"""Layers as torch.compile would run them, on tensors without data.

torch.compile's front end and its choice of what the backward pass keeps are the real ones. In the
place of the kernels, the graph is run node by node, and of what it makes counts what is in memory
there too: results of products and attention, whatever those read, and results of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from rljax.engines.cuda.planning.tensor_memory import TensorMemory

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)
VIEWS = ("view", "_unsafe_view", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "alias")


def compiler(memory: TensorMemory) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a function in the place of torch.compile."""

    def run(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        interpreter = _Interpreter(graph, memory)

        def call(args: list[Any]) -> Any:
            result = interpreter.boxed_run(args)  # inputs are dropped when they have been read
            interpreter.env = {}  # or it would hold the results until the next call
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    backend = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        made: Callable[..., Any] = torch.compile(function, backend=backend)
        return made

    return compiled


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, memory: TensorMemory) -> None:
        super().__init__(graph)
        self._memory = memory
        self._stored = _stored(graph)

    def run_node(self, n: fx.Node) -> Any:
        with self._memory.uncounted():
            result = super().run_node(n)
        if n in self._stored:
            self._memory.add(result, str(n.target))
        return result


def _stored(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose results are in memory: the others are part of a kernel."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "output" or _is_kernel(node):
            found |= {node} if node.op != "output" else set()
            found |= {_viewed(each) for each in node.all_input_nodes}
    return {node for node in found if node.op == "call_function"}


def _is_kernel(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target in PRODUCTS or target.namespace not in ("aten", "prims")


def _viewed(node: fx.Node) -> fx.Node:
    """Returns what a view is of."""
    while node.op == "call_function" and (
        not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket.__name__ in VIEWS
    ):
        node = node.all_input_nodes[0]
    return node
