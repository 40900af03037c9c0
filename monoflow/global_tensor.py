"""Global tensors (PyTorch's DTensors): made from whole values or from pieces, given other layouts, and taken apart again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as DPartial

from monoflow._torch import FakeTensor, module_tables
from monoflow.agreement import Agreement
from monoflow.cutting import NEUTRAL, cut, whole_shape
from monoflow.errors import PlacementError, RankError, SbpError
from monoflow.layout_hint import hint
from monoflow.placement import Placement
from monoflow.sbp import Broadcast, Layout, LayoutLike, Partial, Sbp, Split, broadcast, format_layout, layout, listed, match_layouts, of
from monoflow.world import current_world

M = TypeVar("M", bound=nn.Module)

_REDUCE_OPS = {"sum": "sum", "mean": "avg", "max": "max", "min": "min", "prod": "product", "any": "max", "all": "min"}


def to_placements(found: Layout) -> list[Any]:
    """A layout in PyTorch's terms: Shard, Replicate and Partial, one for each mesh dimension."""
    return [_to_placement(sbp) for sbp in found]


def _to_placement(sbp: Sbp) -> Any:
    if isinstance(sbp, Split):
        return Shard(sbp.dim)
    return Replicate() if isinstance(sbp, Broadcast) else DPartial(_REDUCE_OPS[sbp.reduction])


@overload
def distribute(whole: torch.Tensor, placement: Placement, sbp: LayoutLike) -> torch.Tensor: ...
@overload
def distribute(whole: M, placement: Placement, sbp: Mapping[str, LayoutLike] | None = None) -> M: ...
def distribute(whole: Any, placement: Placement, sbp: Any = None) -> Any:
    """Global tensors from values that every rank holds whole. No communication: each rank keeps its piece.

    Args:
        whole: a tensor, or a module, whose parameters and buffers are replaced in place.
        placement: where it shall live. Every rank of the job makes the call; ranks outside of `placement` hold nothing.
        sbp: one layout for a tensor; for a module, layouts by patterns of names, `{"*.up.weight": "S(0)"}`; what no pattern fits is B.

    Returns: the global tensor, through which gradients flow back to `whole`; or the module itself. Make its optimizer afterwards.

    Raises: SbpError for an SBP that does not fit, LayoutError for a pattern that fits no name, PlacementError for a tensor that lives on
        another device type and under `mf.simulate`. Nothing has been changed then.
    """
    if isinstance(whole, nn.Module):
        return _distribute_module(whole, placement, sbp or {})
    check_real(placement)
    found = layout(sbp, placement.ndim, whole.dim())
    _check_device(whole, placement)
    if isinstance(whole, DTensor):
        raise PlacementError("mf.distribute takes a whole value, this tensor is global already: mf.to_global gives it another layout")
    at = placement.coordinate(current_world().rank or 0)
    if at is not None and whole.requires_grad and torch.is_grad_enabled() and not any(isinstance(s, Partial) for s in found):
        held = DTensor.from_local(whole, placement.mesh(), [Replicate()] * placement.ndim, run_check=False)
        return held.redistribute(placements=to_placements(found))
    piece = whole.detach() if at is None else cut(whole.detach(), found, placement.shape, at)
    return from_own_piece(piece, placement, found, torch.empty_like(whole, device="meta"))


def _distribute_module(module: M, placement: Placement, patterns: Mapping[str, LayoutLike]) -> M:
    check_real(placement)
    tensors: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found = match_layouts(patterns, {name: tuple(t.shape) for name, t in tensors.items()}, placement.ndim) if patterns else {}
    for tensor in tensors.values():
        _check_device(tensor, placement)
    made: dict[int, torch.Tensor] = {}
    for path, child in module.named_modules():
        for table in module_tables(child)[:2]:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                    if id(tensor) not in made:
                        wanted = found.get(f"{path}.{name}".lstrip("."), (broadcast,) * placement.ndim)
                        made[id(tensor)] = global_twin(tensor, placement, wanted)
                    table[name] = made[id(tensor)]
    return module


def global_twin(tensor: torch.Tensor, placement: Placement, found: Layout) -> torch.Tensor:
    """A global tensor with the value of a whole one; a parameter where that is one, with its gradient."""
    with torch.no_grad():
        made = distribute(tensor.detach(), placement, found)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.grad = None if tensor.grad is None else distribute(tensor.grad, placement, found)
    return made


def to_global(value: torch.Tensor, placement: Placement | None = None, sbp: LayoutLike | None = None) -> torch.Tensor:
    """A global tensor from this rank's own piece; or one global tensor in another layout; or a pin inside a step.

    Args:
        value: a plain tensor is this rank's piece of the whole, cut as `torch.chunk` cuts (for P its term, for B the whole). A global
            tensor is given the new layout.
        placement: where the result lives; by default where the global tensor is.
        sbp: the layout; by default that of the global tensor.

    Inside a step that is being captured, tensors are whole, and this pins how `value` lies there; `placement` may be left out. Without a
    placement a plain tensor is returned as it is, so that such a model runs on one device too.

    Gradients flow through. Collective over all ranks of the job.

    Raises, on every rank: SbpError, PlacementError for what does not fit; RankError for a piece of another shape or dtype on one rank.
    """
    if isinstance(value, FakeTensor):
        return value if sbp is None else hint(value, listed(sbp))
    if isinstance(value, DTensor):
        return _relaid(value, placement, sbp)
    if placement is None:
        return value
    return _from_piece(value, placement, sbp)


def _from_piece(piece: torch.Tensor, placement: Placement, sbp: LayoutLike | None) -> torch.Tensor:
    check_real(placement)
    agreement = everyone(placement.device_type)
    with agreement.together():
        if sbp is None:
            raise SbpError('mf.to_global of a piece needs sbp=, such as "S(0)"')
        found = layout(sbp, placement.ndim, piece.dim())
        _check_device(piece, placement)
    told = agreement.exchange_objects((tuple(piece.shape), str(piece.dtype), format_layout(found), str(placement)))
    ranks = list(placement.ranks)
    for label, index in (("dtype", 1), ("sbp", 2), ("placement", 3)):
        if len({told[r][index] for r in ranks}) > 1:
            raise RankError(f"mf.to_global: {label} differs between ranks: {_by_rank(ranks, [told[r][index] for r in ranks])}")
    shapes = [told[r][0] for r in ranks]
    _check_pieces(shapes, found, ranks)
    whole, fits = whole_shape(shapes, found, placement.shape, "mf.to_global: a piece")
    if not fits:
        raise RankError(
            f"mf.to_global: the pieces of {format_layout(found)} are not cut as torch.chunk cuts {whole}: {_by_rank(ranks, shapes)}. "
            "Every piece but the last ones has the same length."
        )
    return from_own_piece(piece.contiguous(), placement, found, torch.empty(whole, device="meta"))


def from_own_piece(piece: torch.Tensor, placement: Placement, found: Layout, whole: torch.Tensor) -> torch.Tensor:
    """A global tensor of which this rank holds `piece`, without a check; `whole` has its shape and strides. Gradients flow to the piece."""
    if placement.coordinate(current_world().rank or 0) is None:
        piece = piece.new_empty((0,))
    mesh, placements = placement.mesh(), to_placements(found)
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _check_pieces(shapes: list[tuple[int, ...]], found: Layout, ranks: list[int]) -> None:
    """Pieces may differ only in dimensions that are cut."""
    first = shapes[0]
    for shape in shapes[1:]:
        if len(shape) != len(first) or any(a != b and Split(d) not in found for d, (a, b) in enumerate(zip(shape, first, strict=True))):
            given = _by_rank(ranks, shapes)
            raise RankError(f"mf.to_global: pieces of {format_layout(found)} may differ only in dimensions that are cut; shapes: {given}")


def _by_rank(ranks: list[int], values: list[Any]) -> str:
    named = [f"{value} on rank {rank}" for rank, value in zip(ranks, values, strict=True)]
    return ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")


def _relaid(value: DTensor, placement: Placement | None, sbp: LayoutLike | None) -> torch.Tensor:
    source = Placement.of(value)
    target = source if placement is None else placement
    found = of(value) if sbp is None and target == source else layout(sbp or "B", target.ndim, value.dim())
    if target == source:
        return _redistributed(value, found)
    if target.device_type != source.device_type or sorted(target.ranks) != sorted(source.ranks):
        raise PlacementError(f"mf.to_global: from {source} to {target}: a global tensor moves between meshes of the same ranks and device")
    whole = DTensor.from_local(value.full_tensor(), target.mesh(), [Replicate()] * target.ndim, run_check=False)
    return _redistributed(whole, found)


def _redistributed(value: DTensor, found: Layout) -> torch.Tensor:
    """In another layout over the same mesh; PyTorch's own conversion makes no partial sums, so these are made here."""
    before = of(value)
    if before == found:
        return value
    made = [isinstance(new, Partial) and new != old for old, new in zip(before, found, strict=True)]
    value = value.redistribute(placements=to_placements(tuple(broadcast if m else s for m, s in zip(made, found, strict=True))))
    at = Placement.of(value).coordinate(current_world().rank or 0)
    if not any(made) or at is None:
        return value
    neutral = [NEUTRAL.get(s.reduction) for m, s, place in zip(made, found, at, strict=True) if m and place and isinstance(s, Partial)]
    local = _KeepOnFirst.apply(value.to_local(), next((n for n in neutral if n is not None), None))
    placements = to_placements(found)
    return DTensor.from_local(
        local, value.device_mesh, placements, run_check=False, shape=value.shape, stride=value.stride(), grad_placements=value.placements
    )


class _KeepOnFirst(torch.autograd.Function):
    """The value, or what changes nothing on ranks other than the first; the whole is the same, hence its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, neutral: int | None) -> torch.Tensor:
        return value.clone() if neutral is None else torch.full_like(value, neutral)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def to_local(value: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a global tensor (for P its term); gradients flow back into the global tensor.

    Raises: PlacementError for a plain tensor.
    """
    if isinstance(value, FakeTensor):
        raise PlacementError("mf.to_local has no meaning inside a step: tensors are whole there, and the step runs on their pieces")
    if not isinstance(value, DTensor):
        raise PlacementError("mf.to_local takes a global tensor, got a plain one")
    return value.to_local()


@functools.lru_cache(maxsize=8)
def everyone(device_type: str) -> Agreement:
    """All ranks of the job."""
    return Agreement(Placement.all(device_type))


def check_real(placement: Placement) -> None:
    """Raises PlacementError where the ranks are simulated."""
    if current_world().rank is None:
        raise PlacementError(
            f"global tensors need real ranks, and those of {placement} are simulated: a simulated step takes whole tensors, and layout= "
            "says how they lie"
        )


def _check_device(tensor: torch.Tensor, placement: Placement) -> None:
    if tensor.device.type != placement.device_type:
        raise PlacementError(f"the tensor is on {tensor.device}, the placement is {placement}: move one of them")
