"""Calls that must know where this rank's piece starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow.layout.call import Call
from monoflow.lower.emit import Emitter

aten = torch.ops.aten
Cut = dict[str, tuple[int, int, int]]
"""Factor -> (offset, size here, whole size)."""


def _masked(emit: Emitter, index: fx.Node, offset: int, size: int) -> tuple[fx.Node, fx.Node]:
    """The index within the piece, and where it lies outside."""
    moved = emit.call(aten.sub.Scalar, index, offset)
    outside = emit.call(aten.bitwise_or.Tensor, emit.call(aten.lt.Scalar, moved, 0), emit.call(aten.ge.Scalar, moved, size))
    return emit.call(aten.masked_fill.Scalar, moved, outside, 0), outside


def embedding(emit: Emitter, call: Call, args: dict[str, Any], cut: Cut) -> fx.Node:
    """Rows that another rank has are zero here."""
    ((offset, size, _),) = cut.values()
    inside, outside = _masked(emit, args["indices"], offset, size)
    found = emit.call(aten.embedding.default, args["weight"], inside)
    return emit.call(aten.masked_fill.Scalar, found, emit.call(aten.unsqueeze.default, outside, -1), 0)


def gather(emit: Emitter, call: Call, args: dict[str, Any], cut: Cut) -> fx.Node:
    """Picks that another rank has are zero here."""
    ((offset, size, _),) = cut.values()
    inside, outside = _masked(emit, args["index"], offset, size)
    found = emit.call(aten.gather.default, args["self"], args["dim"], inside)
    return emit.call(aten.masked_fill.Scalar, found, outside, 0)


def embedding_backward(emit: Emitter, call: Call, args: dict[str, Any], cut: Cut) -> fx.Node:
    """Gradients of rows that another rank has count nothing here."""
    ((offset, size, _),) = cut.values()
    inside, outside = _masked(emit, args["indices"], offset, size)
    grad = emit.call(aten.masked_fill.Scalar, args["grad_output"], emit.call(aten.unsqueeze.default, outside, -1), 0)
    padding = args["padding_idx"] - offset
    padding = padding if 0 <= padding < size else -1
    return emit.call(aten.embedding_dense_backward.default, grad, inside, size, padding, args["scale_grad_by_freq"])


def scatter_add(emit: Emitter, call: Call, args: dict[str, Any], cut: Cut) -> fx.Node:
    """What goes to another rank's piece is not added here."""
    ((offset, size, _),) = cut.values()
    inside, outside = _masked(emit, args["index"], offset, size)
    src = emit.call(aten.masked_fill.Scalar, args["src"], outside, 0)
    return emit.call(aten.scatter_add.default, args["self"], args["dim"], inside, src)


PIECES: dict[str, Callable[[Emitter, Call, dict[str, Any], Cut], fx.Node]] = {
    "embedding": embedding,
    "gather": gather,
    "embedding_dense_backward": embedding_backward,
    "scatter_add": scatter_add,
}
