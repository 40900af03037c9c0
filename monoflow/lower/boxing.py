"""Boxing: a value goes from one layout to another by the cheapest collectives."""

from __future__ import annotations

from torch import fx

from monoflow.layout.cost import DEFAULTS, plan_moves
from monoflow.lower.collectives import emit_move
from monoflow.lower.emit import Emitter
from monoflow.sbp import Layout


def convert(
    emit: Emitter,
    value: fx.Node,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> fx.Node:
    """Writes the ops that take a value to the layout `dst`.

    `value` is the piece in layout `src` that the rank at `coordinate` of the mesh holds of a tensor of the whole `shape`. Every
    rank of the mesh must write the same boxing. Returns `value` itself where nothing is to be done.
    """
    tensor = value.meta["val"]
    layout = src
    for move in plan_moves(src, dst, tuple(shape), mesh_shape, tensor.dtype.itemsize, DEFAULTS[tensor.device.type]):
        value = emit_move(emit, value, move, layout, tuple(shape), mesh_shape, coordinate)
        layout = move.apply(layout)
    return value
