"""Random ops whose result is cut: equal to one device's draw, whatever the layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monoflow.lower.emit import Emitter
from monoflow.rng import DrawPiece
from monoflow.schema import positional_and_keywords

_aten = torch.ops.aten


def draw_piece(emit: Emitter, node: fx.Node, args: dict[str, Any], number: int) -> fx.Node:
    """Draws this rank's piece alone, from a stream of its own; `number` is that of the piece."""
    target: Any = node.target
    positional, keywords = positional_and_keywords(target, args)
    drawn = emit.call(target, *positional, **keywords)
    drawn.target = DrawPiece(target, number)
    return drawn


def draw(emit: Emitter, node: fx.Node, args: dict[str, Any], offsets: list[int], sizes: list[int]) -> fx.Node:
    """Draws the whole tensor, as one device would, and keeps this rank's piece. Every rank's generator moves on alike."""
    target: Any = node.target
    whole = dict(args)
    for argument in target._schema.arguments:
        value = args[argument.name]
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            whole[argument.name] = _blank(emit, node.meta["val"], value.meta["val"].dtype)
    positional, keywords = positional_and_keywords(target, whole)
    drawn = emit.call(target, *positional, **keywords)
    for dim, (offset, size, full) in enumerate(zip(offsets, sizes, node.meta["val"].shape, strict=True)):
        if size != full:
            drawn = emit.call(_aten.slice.Tensor, drawn, dim, offset, offset + size)
    return drawn


def _blank(emit: Emitter, value: torch.Tensor, dtype: torch.dtype) -> fx.Node:
    """Memory of the whole shape; the op reads its shape only."""
    return emit.call(_aten.empty_strided.default, list(value.shape), list(value.stride()), dtype=dtype, device=value.device)
