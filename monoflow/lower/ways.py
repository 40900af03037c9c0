"""Each backend's way to do a collective: the fastest that is sound, as `python -m benchmarks.collectives` measures it.

gloo on one machine (2 ranks of one thread, 64 MB): a reduce-scatter takes three to four times as long as an all-to-all and a sum of what
has arrived. An all-gather that is under way together with another collective corrupts memory in PyTorch 2.13
(`python -m benchmarks.collectives --crash` shows it without monoflow); an all-to-all of copies takes as long.
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

AllGather = Literal["all-gather", "all-to-all of copies"]

ALL_GATHER: dict[str, AllGather] = {"cpu": "all-to-all of copies", "cuda": "all-gather"}
"""By device type."""

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
    """Rewrites one rank's graph in place: all-gathers and reduce-scatters in the way of their device."""
    emit = Emitter(graph, fake_mode_of_graph(graph))
    for node in graph.find_nodes(op="call_function", target=_functional.reduce_scatter_tensor.default):
        if REDUCE_SCATTER[node.meta["val"].device.type] == "all-to-all and sum":
            _exchange_and_sum(emit, node)
    for node in graph.find_nodes(op="call_function", target=_functional.all_gather_into_tensor.default):
        if ALL_GATHER[node.meta["val"].device.type] == "all-to-all of copies":
            _exchange_copies(emit, node)


def _exchange_copies(emit: Emitter, node: fx.Node) -> None:
    value, parts, group = node.args
    assert isinstance(value, fx.Node) and isinstance(parts, int)
    emit.info = node.meta.get("op")
    shape = value.meta["val"].shape
    with emit.graph.inserting_before(node):
        copies = emit.call(_aten.repeat.default, value, [parts] + [1] * (len(shape) - 1))
        exchanged = emit.call(_functional.all_to_all_single.default, copies, [shape[0]] * parts, [shape[0]] * parts, group)
    exchanged.meta = {**node.meta, **exchanged.meta, "kind": "all-gather"}
    node.replace_all_uses_with(exchanged)
    emit.graph.erase_node(node)


def _exchange_and_sum(emit: Emitter, node: fx.Node) -> None:
    value, reduction, parts, group = node.args
    assert isinstance(value, fx.Node) and isinstance(parts, int)
    emit.info = node.meta.get("op")
    lengths = [value.meta["val"].shape[0] // parts] * parts
    with emit.graph.inserting_before(node):
        exchanged = emit.call(_functional.all_to_all_single.default, value, lengths, lengths, group)
    exchanged.meta["kind"] = "reduce-scatter"
    for wait in list(node.users):
        with emit.graph.inserting_before(wait):
            arrived = emit.call(_functional.wait_tensor.default, exchanged)
            pieces = emit.call(_aten.view.default, arrived, [parts, *node.meta["val"].shape])
            summed = _LOCALLY[str(reduction)](emit, pieces, node.meta["val"].dtype)
        wait.replace_all_uses_with(summed)
        emit.graph.erase_node(wait)
    emit.graph.erase_node(node)
