"""Cuts a whole tensor into the pieces of all ranks of a mesh, and puts pieces together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from monoflow.errors import RankError
from monoflow.sbp import Layout, Partial, Split, piece_of

NEUTRAL = {"sum": 0, "prod": 1}
"""What ranks other than the first hold of a term; under the other reductions each may hold the whole."""


def coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates of a mesh in row-major order."""
    return itertools.product(*map(range, mesh_shape))


def narrowed(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of the part of `whole` that starts at `offsets`."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def cut(whole: torch.Tensor, found: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    """A copy of the piece that the rank at `coordinate` holds of `whole`."""
    piece = narrowed(whole, *piece_of(whole.shape, found, mesh_shape, coordinate))
    piece = torch.empty_like(piece).copy_(piece)
    for sbp, place in zip(found, coordinate, strict=True):
        if isinstance(sbp, Partial) and sbp.reduction in NEUTRAL and place:
            piece.fill_(NEUTRAL[sbp.reduction])
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
    if parts[0].dtype == torch.complex32:  # PyTorch adds none of these on the CPU
        return assemble([p.to(torch.complex64) for p in parts], found[:1], mesh_shape[:1]).to(torch.complex32)
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


def whole_shape(shapes: Sequence[tuple[int, ...]], found: Layout, mesh_shape: Sequence[int], what: str) -> tuple[tuple[int, ...], bool]:
    """(shape of the whole of which all ranks, in row-major order, hold pieces of `shapes`; whether it is cut as `torch.chunk` cuts).

    Raises: RankError, which begins with `what`, where ranks that hold the same piece have other shapes.
    """
    whole = _joined(list(shapes), found, mesh_shape, what)
    every = zip(shapes, coordinates(mesh_shape), strict=True)
    return whole, all(list(shape) == piece_of(whole, found, mesh_shape, at)[1] for shape, at in every)


def _joined(shapes: list[tuple[int, ...]], found: Layout, mesh_shape: Sequence[int], what: str) -> tuple[int, ...]:
    if not mesh_shape:
        return shapes[0]
    step = len(shapes) // mesh_shape[0]
    parts = [_joined(shapes[i : i + step], found[1:], mesh_shape[1:], what) for i in range(0, len(shapes), step)]
    if isinstance(found[0], Split):
        d = found[0].dim
        return (*parts[0][:d], sum(p[d] for p in parts), *parts[0][d + 1 :])
    if len(set(parts)) > 1:
        raise RankError(f"{what} must have one shape on ranks that hold the same piece, got {sorted(set(parts))}")
    return parts[0]
