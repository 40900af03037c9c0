"""Each backend's fastest way to do a collective, as `python -m benchmarks.collectives` measures it.

gloo on one machine (2 ranks of one thread, 64 MB): a reduce-scatter takes three to four times as long as an all-to-all and a sum of what
has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx

from monoflow.capture.graph import fake_mode_of_graph
from monoflow.lower.emit import Emitter

_aten = torch.ops.aten
_functional: Any = torch.ops._c10d_functional

ReduceScatter = Literal["reduce-scatter", "all-to-all and sum"]

REDUCE_SCATTER: dict[str, ReduceScatter] = {"cpu": "all-to-all and sum", "cuda": "reduce-scatter"}
"""By device type."""

_LOCALLY: dict[str, Callable[[Emitter, fx.Node, torch.dtype], fx.Node]] = {
    "sum": lambda emit, pieces, dtype: emit.call(_aten.sum.dim_IntList, pieces, [0], dtype=dtype),
    "max": lambda emit, pieces, dtype: emit.call(_aten.amax.default, pieces, [0]),
    "min": lambda emit, pieces, dtype: emit.call(_aten.amin.default, pieces, [0]),
    "product": lambda emit, pieces, dtype: emit.call(_aten.prod.dim_int, pieces, 0, dtype=dtype),
}
"""Reduction -> the op that combines the first dimension, with a result of the given dtype."""


def choose_ways(graph: fx.Graph) -> None:
    """Rewrites one rank's graph in place: reduce-scatters in the way that is fastest on their device."""
    emit = Emitter(graph, fake_mode_of_graph(graph))
    for node in graph.find_nodes(op="call_function", target=_functional.reduce_scatter_tensor.default):
        if REDUCE_SCATTER[node.meta["val"].device.type] == "all-to-all and sum":
            _exchange_and_sum(emit, node)


def _exchange_and_sum(emit: Emitter, node: fx.Node) -> None:
    value, reduction, parts, group = node.args
    assert isinstance(value, fx.Node) and isinstance(parts, int)
    emit.info = node.meta.get("op")
    lengths = [value.meta["val"].shape[0] // parts] * parts
    with emit.graph.inserting_before(node):
        exchanged = emit.call(_functional.all_to_all_single.default, value, lengths, lengths, group)
    for wait in list(node.users):
        with emit.graph.inserting_before(wait):
            arrived = emit.call(_functional.wait_tensor.default, exchanged)
            pieces = emit.call(_aten.view.default, arrived, [parts, *node.meta["val"].shape])
            summed = _LOCALLY[str(reduction)](emit, pieces, node.meta["val"].dtype)
        wait.replace_all_uses_with(summed)
        emit.graph.erase_node(wait)
    emit.graph.erase_node(node)
