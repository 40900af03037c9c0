"""Tensors from nothing: PyTorch's factories that take a placement and an SBP as well.

Without a placement they are PyTorch's own. With one, every rank of the job makes the call with the same arguments, and gets its piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monoflow.global_tensor import check_real, distribute, everyone, from_own_piece
from monoflow.placement import Placement
from monoflow.rng import Random
from monoflow.sbp import LayoutLike, Partial, layout, piece_number, piece_of
from monoflow.world import current_world


def tensor(data: Any, *, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.tensor`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.tensor(data, **_options(options, placement)), placement, sbp)


def zeros(*size: Any, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.zeros`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.zeros(*size, **_options(options, placement)), placement, sbp)


def ones(*size: Any, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.ones`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.ones(*size, **_options(options, placement)), placement, sbp)


def empty(*size: Any, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.empty`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.empty(*size, **_options(options, placement)), placement, sbp)


def full(size: Any, fill_value: Any, *, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.full`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.full(size, fill_value, **_options(options, placement)), placement, sbp)


def arange(*bounds: Any, placement: Placement | None = None, sbp: LayoutLike = "B", **options: Any) -> torch.Tensor:
    """`torch.arange`, laid out over the ranks of `placement`. Raises what `mf.distribute` raises."""
    return _laid(torch.arange(*bounds, **_options(options, placement)), placement, sbp)


def rand(*size: Any, placement: Placement | None = None, sbp: LayoutLike = "B", random: Random = "exact", **options: Any) -> torch.Tensor:
    """`torch.rand`, laid out over the ranks of `placement`; for `random` see `randn`."""
    return _drawn(torch.rand, size, placement, sbp, random, options)


def randn(*size: Any, placement: Placement | None = None, sbp: LayoutLike = "B", random: Random = "exact", **options: Any) -> torch.Tensor:
    """`torch.randn`, laid out over the ranks of `placement`.

    Args:
        size: the whole shape.
        random: "exact" gives the values of one device, whatever the layout; every rank draws all of them and keeps its piece. "fast" draws
            an independent stream for each piece (P is drawn as B), equal on ranks that hold the same piece; no rank draws more than that.

    The first rank's generator counts, and all generators end up alike where they began so.
    Raises what `mf.distribute` raises.
    """
    return _drawn(torch.randn, size, placement, sbp, random, options)


def randint(
    low: int, high: int, size: Any, *, placement: Placement | None = None, sbp: LayoutLike = "B", random: Random = "exact", **options: Any
) -> torch.Tensor:
    """`torch.randint`, laid out over the ranks of `placement`; for `random` see `randn`."""
    return _drawn(lambda size, **kept: torch.randint(low, high, size, **kept), (size,), placement, sbp, random, options)


def _laid(whole: torch.Tensor, placement: Placement | None, sbp: LayoutLike) -> torch.Tensor:
    if placement is None:
        return whole
    made = distribute(whole.detach(), placement, sbp)
    return made.requires_grad_(whole.requires_grad)


def _options(options: dict[str, Any], placement: Placement | None) -> dict[str, Any]:
    return options if placement is None else {"device": placement.device_type, **options}


def _drawn(
    draw: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    placement: Placement | None,
    sbp: LayoutLike,
    random: Random,
    options: dict[str, Any],
) -> torch.Tensor:
    shape = list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)
    if placement is None:
        return draw(shape, **options)
    options = _options(options, placement)
    found = layout(sbp, placement.ndim, len(shape))
    check_real(placement)
    with everyone(placement.device_type).first_generator():
        if random == "exact":
            return _laid(draw(shape, **options), placement, found)
        seed = int(torch.randint(2**62, ()))
    at = placement.coordinate(current_world().rank or 0) or (0,) * placement.ndim
    generator = torch.Generator(options["device"]).manual_seed(seed + piece_number(found, placement.shape, at))
    drawn = draw(piece_of(shape, found, placement.shape, at)[1], generator=generator, **options)
    if any(isinstance(s, Partial) and place for s, place in zip(found, at, strict=True)):
        drawn = torch.zeros_like(drawn)  # the first rank's is the whole sum
    return from_own_piece(drawn, placement, found, torch.empty(shape, device="meta"))
