"""Gives the user's parameters, buffers and optimizer state the layouts of a graph, for good: what is not B becomes a global tensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from monoflow.global_tensor import global_twin
from monoflow.placement import Placement
from monoflow.sbp import Layout
from monoflow.state import Inventory, State


def distribute_state(state: State, inventory: Inventory, layouts: Mapping[tuple[str, str], Layout], placement: Placement) -> None:
    """Replaces tensors of the state by global ones. `layouts` maps (kind, name) to what is not B; tensors that are global already stay.

    A parameter becomes another object: in its module, in the optimizers' groups and as the key of their state. Its `.grad` goes with it.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for entry in inventory.tensors:
        found = layouts.get((entry.kind, entry.name))
        if found is None or isinstance(entry.tensor, DTensor):
            continue
        made = global_twin(entry.tensor, placement, found)
        for place in entry.places:
            place.write(made)
        if isinstance(entry.tensor, nn.Parameter):
            replaced[entry.tensor] = made  # type: ignore[assignment]
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(p, p) for p in group["params"]]
        for old, new in replaced.items():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
