"""Counts what a rank's graph sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.lower.collectives import mesh_dim_of
from monoflow.source import OpInfo

_KINDS = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a graph: `sent` are the bytes that a rank sends in it, by the formula of the bandwidth-optimal algorithm.

    `kind` is what it is for: on some backends an all-to-all does the work of an all-gather or a reduce-scatter.
    all-reduce 2(N-1)/N of the tensor, all-gather (N-1)/N of the result, reduce-scatter and all-to-all (N-1)/N of the argument.
    """

    kind: str
    mesh_dim: int
    ranks: int
    dtype: torch.dtype
    size: int
    sent: int
    source: OpInfo | None


def collectives_of(graph: fx.Graph, mesh_shape: tuple[int, ...]) -> Iterator[Collective]:
    """The collectives of one rank's graph, in order, before its groups have got their real names."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "_c10d_functional":
            continue
        kind = _KINDS.get(node.target._schema.name.split("::")[1])
        if kind is None:
            continue
        value, dim = node.args[0].meta["val"], mesh_dim_of(next(a for a in reversed(node.args) if isinstance(a, str)))
        ranks = mesh_shape[dim]
        size = value.numel() * value.element_size() * (ranks if kind == "all-gather" else 1)
        sent = size * (ranks - 1) // ranks * (2 if kind == "all-reduce" else 1)
        yield Collective(node.meta.get("kind", kind), dim, ranks, value.dtype, size, sent, node.meta.get("op"))
