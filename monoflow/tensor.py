"""Eager global tensors: PyTorch's DTensors, made from whole values or from pieces, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial

from monoflow.errors import PlacementError
from monoflow.placement import Placement
from monoflow.sbp import Broadcast, Layout, LayoutLike, Partial, Split, broadcast, layout, piece_of
from monoflow.world import current_world

_REDUCE_OPS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min", "prod": "product", "any": "max", "all": "min"}
_REDUCTIONS = {"sum": "sum", "avg": "mean", "max": "max", "min": "min", "product": "prod"}


def to_placements(found: Layout) -> list[Any]:
    """A layout in PyTorch's terms: Shard, Replicate and Partial, one for each mesh dimension."""
    return [_to_placement(sbp) for sbp in found]


def _to_placement(sbp: Any) -> Any:
    if isinstance(sbp, Split):
        return Shard(sbp.dim)
    return Replicate() if isinstance(sbp, Broadcast) else DPartial(_REDUCE_OPS[sbp.reduction])


def layout_of_global(tensor: Any) -> Layout:
    """The layout of a global tensor."""
    found: list[Any] = []
    for placement in tensor.placements:
        if isinstance(placement, Shard):
            found.append(Split(placement.dim))
        else:
            found.append(broadcast if isinstance(placement, Replicate) else Partial(_REDUCTIONS[placement.reduce_op]))  # type: ignore[arg-type]
    return tuple(found)


def distribute(whole: torch.Tensor, placement: Placement, sbp: LayoutLike) -> torch.Tensor:
    """A global tensor from a value that every rank holds whole. No communication: each rank keeps its piece.

    Raises: SbpError for an SBP that does not fit, PlacementError for a tensor on another device type.
    """
    found = layout(sbp, placement.ndim, whole.dim())
    if whole.device.type != placement.device_type:
        raise PlacementError(f"the tensor is on {whole.device}, the placement is {placement}: move one of them")
    at = placement.coordinate(current_world().rank or 0)
    piece = whole.new_empty((0,)) if at is None else _piece(whole, found, placement.shape, at)
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(piece, placement.mesh(), to_placements(found), run_check=False, shape=shape, stride=stride)


def _piece(whole: torch.Tensor, found: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    offsets, sizes = piece_of(whole.shape, found, mesh_shape, at)
    piece = whole
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        piece = piece.narrow(dim, offset, size)
    first = all(place == 0 for sbp, place in zip(found, at, strict=True) if isinstance(sbp, Partial))
    return piece.clone(memory_format=torch.contiguous_format) if first else torch.zeros_like(piece)
