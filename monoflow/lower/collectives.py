"""One move of one rank's value, written as ops into the rank's local graph.

Every rank writes the same ops in the same order, only numbers differ, so that simulated ranks can run in lockstep. Uneven pieces are
filled up to the length of the longest and cut again. The group of a collective is named `mesh0`, `mesh1`, ... for the mesh dimension
along which it runs. Results are contiguous, but for slices and pieces of a dimension cut unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed  # registers the ops
from torch import fx

from monoflow.layout.moves import Move
from monoflow.lower.emit import Emitter
from monoflow.sbp import Broadcast, Layout, Partial, Split, piece_bounds

aten: Any = torch.ops.aten
functional: Any = torch.ops._c10d_functional


def group_name(mesh_dim: int) -> str:
    """What stands in a local graph for the process group along a mesh dimension."""
    return f"mesh{mesh_dim}"


def mesh_dim_of(group: str) -> int:
    """The mesh dimension of a group's name."""
    return int(group.removeprefix("mesh"))


def emit_move(
    emit: Emitter,
    value: fx.Node,
    move: Move,
    layout: Layout,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> fx.Node:
    """Writes the ops of one move; returns the value after it.

    `value` is the piece in `layout` that the rank at `coordinate` of the mesh holds of a tensor of the whole `shape`.
    """
    parts = mesh_shape[move.mesh_dim]
    if parts == 1:
        return value
    site = _Site(emit, group_name(move.mesh_dim), parts, coordinate[move.mesh_dim])
    src, dst = move.src, move.dst

    def cut(dim: int) -> _Cut:
        return _cut(dim, move.mesh_dim, layout, shape, mesh_shape, coordinate)

    match src, dst:
        case Broadcast(), Split(dim):
            return site.slice(value, cut(dim))
        case Broadcast(), Partial(reduction):
            return site.keep_on_first(value, reduction)
        case Split(dim), Broadcast():
            return site.all_gather(value, cut(dim))
        case Split(dim), Split(other):
            return site.all_to_all(value, cut(dim), cut(other))
        case Split(dim), Partial("sum"):
            return site.surround_with_zeros(value, cut(dim))
        case Partial(reduction), Broadcast():
            return site.all_reduce(value, reduction)
        case Partial(reduction), Split(dim):
            return site.reduce_scatter(value, cut(dim), reduction)
    raise ValueError(f"not a move: {move}")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Dimension `dim` as it is before a mesh dimension cuts it: `size` long on this rank.

    `even` when every rank of the mesh, wherever it is, gets pieces of one length.
    """

    dim: int
    size: int
    even: bool
    parts: int
    index: int

    @property
    def longest(self) -> int:
        return -(-self.size // self.parts)

    @property
    def bounds(self) -> tuple[int, int]:
        return piece_bounds(self.size, self.parts, self.index)


def _cut(dim: int, mesh_dim: int, layout: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> _Cut:
    size = shape[dim]
    anywhere = {size}
    for outer in range(mesh_dim):
        if layout[outer] == Split(dim):
            parts = mesh_shape[outer]
            size = piece_bounds(size, parts, coordinate[outer])[1]
            anywhere = {piece_bounds(s, parts, i)[1] for s in anywhere for i in range(parts)}
    parts = mesh_shape[mesh_dim]
    return _Cut(dim, size, all(s % parts == 0 for s in anywhere), parts, coordinate[mesh_dim])


_COMMUNICATED = {"sum": "sum", "mean": "sum", "max": "max", "any": "max", "min": "min", "all": "min", "prod": "product"}

_CARRIERS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.float16,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex64: torch.float64,
}
"""Dtypes that some backends do not know -> one of the same size as which the bytes travel, where nothing is computed on the way."""


@dataclass(frozen=True, slots=True)
class _Site:
    """Where ops are written, and the group along which the move goes: its name, its number of ranks, this rank's index in it."""

    emit: Emitter
    group: str
    parts: int
    index: int

    def slice(self, value: fx.Node, cut: _Cut) -> fx.Node:
        start, length = cut.bounds
        return self._narrow(value, cut.dim, start, length)

    def keep_on_first(self, value: fx.Node, reduction: str) -> fx.Node:
        """Sums and products: the others hold what changes nothing. For the rest every rank may hold the value."""
        if reduction not in ("sum", "prod"):
            return value
        tensor: torch.Tensor = value.meta["val"]
        neutral: bool | int = reduction == "prod"
        if tensor.dtype != torch.bool:
            neutral = int(neutral)
        keep = self.emit.call(aten.scalar_tensor.default, self.index == 0, dtype=torch.bool, device=tensor.device)
        return self.emit.call(aten.where.ScalarOther, keep, value, neutral)

    def surround_with_zeros(self, value: fx.Node, cut: _Cut) -> fx.Node:
        start, length = cut.bounds
        return self._pad(value, cut.dim, start, cut.size - start - length)

    def all_gather(self, value: fx.Node, cut: _Cut) -> fx.Node:
        dtype = value.meta["val"].dtype
        value = self._carried(self._filled(value, cut))
        value = self._communicate(functional.all_gather_into_tensor.default, self._contiguous(value), self.parts, self.group)
        value = self._returned(value, dtype)
        if cut.dim != 0:
            value = self._contiguous(self._rows_to_dim(value, cut.dim))
        return value if cut.even else self._contiguous(self._narrow(value, cut.dim, 0, cut.size))

    def all_to_all(self, value: fx.Node, left: _Cut, entered: _Cut) -> fx.Node:
        """Rank j gets piece j of dimension `entered`. The pieces travel with that dimension first, in rows."""
        dtype = value.meta["val"].dtype
        value = self._carried(self._filled(value, left))
        if entered.dim != 0:
            value = self.emit.call(aten.movedim.int, value, entered.dim, 0)
        sent = [piece_bounds(entered.size, self.parts, i)[1] for i in range(self.parts)]
        mine = entered.bounds[1]
        value = self._communicate(functional.all_to_all_single.default, self._contiguous(value), [mine] * self.parts, sent, self.group)
        value = self._returned(value, dtype)
        rows = self._shape(value)[1:]
        value = self.emit.call(aten.view.default, value, [self.parts, mine, *rows])
        if entered.dim != 0:
            value = self.emit.call(aten.movedim.int, value, 1, entered.dim + 1)
        value = self._join_front(value, left.dim)
        return value if left.even else self._contiguous(self._narrow(value, left.dim, 0, left.size))

    def all_reduce(self, value: fx.Node, reduction: str) -> fx.Node:
        dtype = value.meta["val"].dtype
        reduction = _for_dtype(reduction, dtype)
        value = self._communicate(functional.all_reduce.default, self._numeric(value), _COMMUNICATED[reduction], self.group)
        return self._averaged(self._returned(value, dtype), reduction)

    def reduce_scatter(self, value: fx.Node, cut: _Cut, reduction: str) -> fx.Node:
        dtype = value.meta["val"].dtype
        reduction = _for_dtype(reduction, dtype)
        value = self._numeric(value)
        if not cut.even:
            value = self._pad(value, cut.dim, 0, cut.longest * self.parts - cut.size)
        if cut.dim != 0:
            value = self._dim_to_rows(value, cut.dim)
        target = functional.reduce_scatter_tensor.default
        value = self._communicate(target, self._contiguous(value), _COMMUNICATED[reduction], self.parts, self.group)
        if not cut.even:
            value = self._narrow(value, cut.dim, 0, cut.bounds[1])
        return self._averaged(self._returned(value, dtype), reduction)

    def _communicate(self, target: Any, *args: Any) -> fx.Node:
        return self.emit.call(functional.wait_tensor.default, self.emit.call(target, *args))

    def _filled(self, value: fx.Node, cut: _Cut) -> fx.Node:
        """This rank's piece at the length of the longest."""
        return value if cut.even else self._pad(value, cut.dim, 0, cut.longest - cut.bounds[1])

    def _pad(self, value: fx.Node, dim: int, before: int, after: int) -> fx.Node:
        inner = len(self._shape(value)) - 1 - dim
        return self.emit.call(aten.constant_pad_nd.default, value, [0, 0] * inner + [before, after])

    def _narrow(self, value: fx.Node, dim: int, start: int, length: int) -> fx.Node:
        return self.emit.call(aten.slice.Tensor, value, dim, start, start + length)

    def _contiguous(self, value: fx.Node) -> fx.Node:
        return self.emit.call(aten.contiguous.default, value)

    def _rows_to_dim(self, value: fx.Node, dim: int) -> fx.Node:
        """The ranks' pieces stand one after the other in rows: puts them side by side in `dim`."""
        rows, *rest = self._shape(value)
        return self._join_front(self.emit.call(aten.view.default, value, [self.parts, rows // self.parts, *rest]), dim)

    def _join_front(self, value: fx.Node, dim: int) -> fx.Node:
        """Dimension 0 counts pieces of dimension `dim` of the rest: joins them."""
        sizes = self._shape(value)[1:]
        if dim != 0:
            value = self.emit.call(aten.movedim.int, value, 0, dim)
        sizes[dim] *= self.parts
        return self.emit.call(aten.reshape.default, value, sizes)

    def _dim_to_rows(self, value: fx.Node, dim: int) -> fx.Node:
        """The pieces of `dim`, one after the other in rows."""
        sizes = self._shape(value)
        cut = [*sizes[:dim], self.parts, sizes[dim] // self.parts, *sizes[dim + 1 :]]
        value = self.emit.call(aten.movedim.int, self.emit.call(aten.view.default, self._contiguous(value), cut), dim, 0)
        first, *rest = self._shape(value)[1:]
        return self.emit.call(aten.reshape.default, value, [self.parts * first, *rest])

    def _carried(self, value: fx.Node) -> fx.Node:
        dtype = value.meta["val"].dtype
        if dtype == torch.complex128:  # no dtype that backends know is as large
            return self._numeric(value)
        carrier = _CARRIERS.get(dtype)
        return value if carrier is None else self.emit.call(aten.view.dtype, value, carrier)

    def _numeric(self, value: fx.Node) -> fx.Node:
        """Truth values as numbers, complex numbers as pairs of real ones, for the reductions."""
        dtype = value.meta["val"].dtype
        if dtype.is_complex:
            return self.emit.call(aten.view_as_real.default, value)
        return self.emit.call(aten.view.dtype, value, torch.uint8) if dtype == torch.bool else value

    def _returned(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        given = value.meta["val"].dtype
        if dtype.is_complex and given == dtype.to_real():
            return self.emit.call(aten.view_as_complex.default, self._contiguous(value))
        return value if given == dtype else self.emit.call(aten.view.dtype, value, dtype)

    def _averaged(self, value: fx.Node, reduction: str) -> fx.Node:
        return self.emit.call(aten.div.Scalar, value, self.parts) if reduction == "mean" else value

    @staticmethod
    def _shape(value: fx.Node) -> list[int]:
        return list(value.meta["val"].shape)


def _for_dtype(reduction: str, dtype: torch.dtype) -> str:
    """A sum of truth values is true where any is, as PyTorch adds them."""
    return "any" if dtype == torch.bool and reduction in ("sum", "mean") else reduction
