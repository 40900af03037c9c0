"""What a sharded step holds, whole: for evaluation, generation and checkpoints in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monoflow._torch import pytree
from monoflow.state import Inventory, Place
from monoflow.step import Step
from monoflow.tree import is_global


@contextlib.contextmanager
def whole_state(inventory: Inventory) -> Iterator[None]:
    """Inside, modules hold plain parameters and buffers; after, the global ones that they held before. Collective."""
    replaced: list[tuple[Place, torch.Tensor]] = []
    try:
        for entry in inventory.tensors:
            if entry.kind == "optimizer" or not is_global(entry.tensor):
                continue
            whole: torch.Tensor = entry.tensor.detach().full_tensor()  # type: ignore[attr-defined]
            if isinstance(entry.tensor, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=entry.tensor.requires_grad)
            for place in entry.places:
                place.write(whole)
                replaced.append((place, entry.tensor))
        yield
    finally:
        for place, tensor in replaced:
            place.write(tensor)


def full_state_dict(step: Step[Any, Any]) -> dict[str, Any]:
    """The state of a step in plain tensors on the CPU, on the first rank; an empty dictionary on the others. Collective.

    {"model": its `state_dict()`, "optimizer": its `state_dict()`}, and "model1", "optimizer1", ... where a step has more of them, in the
    order in which `mf.graph` was given them. Plain PyTorch loads each part on one device.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        full = value.full_tensor() if is_global(value) else value  # type: ignore[attr-defined]
        return full.detach().to("cpu", copy=True) if first else None

    parts = step.stateful()
    found = {name: pytree.tree_map(whole, part.state_dict()) for name, part in parts.items()}
    return found if first else {}
