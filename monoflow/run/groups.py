"""Replaces the names of mesh dimensions in a local graph by those of this rank's process groups."""

from __future__ import annotations

from torch import fx

from monoflow._torch import OpOverload
from monoflow.lower.collectives import group_name
from monoflow.placement import Placement

NAMESPACE = "_c10d_functional"


def bind_groups(graph: fx.Graph, placement: Placement) -> None:
    """Changes the graph in place: the group "mesh0" becomes the process group along mesh dimension 0 of which this rank is a member."""
    mesh = placement.mesh()
    names = {group_name(dim): mesh.get_group(dim).group_name for dim in range(placement.ndim)}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE:
            node.args = tuple(names.get(a, a) if isinstance(a, str) else a for a in node.args)
