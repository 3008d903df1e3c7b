"""Memory of tensors that have no data, counted as their operators make them and drop them."""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

BLOCK = 512  # bytes of which PyTorch's allocator takes a multiple
Label = tuple[str, str]  # phase, operator


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of all storages made while it is active, and their peak.

    It stands inside a FakeTensorMode. A program that asks for a number of a tensor is given 1.

    Example:
        with FakeTensorMode(), TensorMemory().counting() as memory:
            learner.update(batch)
        print(memory.peak)
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""  # goes into the labels of what is made
        self.now = self.peak = 0  # bytes
        self.at_peak: Mapping[Label, int] = {}  # bytes by label
        self._sizes: collections.Counter[Label] = collections.Counter()
        self._storages: dict[int, tuple[int, Label]] = {}  # bytes and label, by a number of the storage
        self._numbers: Any = WeakIdKeyDictionary()
        self._next = itertools.count()
        self._uncounted = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or torch.compile would leave functions as they are

    @contextlib.contextmanager
    def counting(self) -> Iterator[TensorMemory]:
        """Counts meanwhile; FSDP resizes storages, which is no operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if (number := self._numbers.get(storage)) is not None:
                self._set(number, size, self._storages[number][1])

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        result = func(*args, **(kwargs or {}))
        self.add(result, str(func))
        return result

    def add(self, result: Any, operator: str) -> None:
        """Counts the storages of an operator's result that are new, but on the meta device."""
        if self._uncounted:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                if storage not in self._numbers:
                    number = next(self._next)
                    self._numbers[storage] = number
                    self._set(number, storage.nbytes(), (self.phase, operator))
                    weakref.finalize(storage, self._drop, number)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves out what is made meanwhile."""
        self._uncounted += 1
        try:
            yield
        finally:
            self._uncounted -= 1

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as one kernel: of what it makes its results alone are counted."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self.uncounted():
                result = function(*args, **kwargs)
            self.add(result, "fused")
            return result

        return kernel

    def _set(self, number: int, size: int, label: Label) -> None:
        size = -(-size // BLOCK) * BLOCK
        grown = size - self._storages.get(number, (0, label))[0]
        self._storages[number] = (size, label)
        self._sizes[label] += grown
        self.now += grown
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self._sizes)

    def _drop(self, number: int) -> None:
        size, label = self._storages.pop(number)
        self._sizes[label] -= size
        self.now -= size
