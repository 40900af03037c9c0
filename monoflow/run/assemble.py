"""Cuts a whole tensor into the pieces of all ranks of a mesh, and puts pieces together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from monoflow.sbp import Layout, Partial, Split, piece_of

_NEUTRAL = {"sum": 0, "prod": 1}
"""What ranks other than the first hold of a term; under the other reductions each may hold the whole."""


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates of a mesh in row-major order."""
    return itertools.product(*map(range, mesh_shape))


def cut(whole: torch.Tensor, found: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    """A copy of the piece that the rank at `coordinate` holds of `whole`."""
    offsets, sizes = piece_of(whole.shape, found, mesh_shape, coordinate)
    piece = whole
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        piece = piece.narrow(dim, offset, size)
    piece = torch.empty_like(piece).copy_(piece)
    for sbp, place in zip(found, coordinate, strict=True):
        if isinstance(sbp, Partial) and sbp.reduction in _NEUTRAL and place:
            piece.fill_(_NEUTRAL[sbp.reduction])
    return piece


def assemble(pieces: Sequence[torch.Tensor], found: Layout, mesh_shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor of which all ranks, in row-major order, hold `pieces`."""
    if not mesh_shape:
        return pieces[0]
    step = len(pieces) // mesh_shape[0]
    parts = [assemble(pieces[i : i + step], found[1:], mesh_shape[1:]) for i in range(0, len(pieces), step)]
    sbp = found[0]
    if isinstance(sbp, Split):
        return torch.cat(parts, sbp.dim)
    if not isinstance(sbp, Partial):
        return parts[0]
    stacked = torch.stack(parts)
    match sbp.reduction:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "mean":
            return stacked.mean(0)
        case "prod":
            return stacked.prod(0, dtype=stacked.dtype)
        case "max" | "any":
            return stacked.amax(0)
        case _:
            return stacked.amin(0)
