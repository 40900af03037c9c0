"""Counts the bytes of all tensors while a step runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from monoflow._torch import TorchDispatchMode, pytree


class MemoryTracker(TorchDispatchMode):
    """Inside, every tensor that an op makes is followed by its storage, until nobody holds that any more.

    Counted are the bytes that storages have at the end of an op; what a kernel needs for itself while it runs is not seen, nor are ops
    inside of compiled regions.

    Args:
        held: tensors that are there already.

    Attributes:
        peak: the largest number of bytes so far.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        self._follow(held)

    @property
    def held(self) -> int:
        """Bytes of all storages that are alive now."""
        alive = (found for reference in self._storages.values() if (found := reference()) is not None)
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._follow(pytree.tree_leaves(result))
        return result

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if self._storages.get(key) is reference:
            del self._storages[key]

    def _follow(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                key = id(storage)
                known = self._storages.get(key)
                if known is None or known() is not storage:
                    self._storages[key] = weakref.ref(storage, functools.partial(self._forget, key))
        self.peak = max(self.peak, self.held)
