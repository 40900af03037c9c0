"""The written rules of a valid step graph, checked after capture and after every pass.

1. fx's own: arguments are defined before their use, names are unique, exactly one output.
2. There is one placeholder for each input, and one output for each returned value and each write.
3. Every call node has an `OpInfo` with a phase and at least one frame, and calls an ATen op, a custom op or a plain function.
4. Every call node knows the metadata of its result (`meta["val"]`).
"""

from __future__ import annotations

import torch
from torch import fx

from monoflow.capture.graph import Captured, describe_node
from monoflow.errors import GraphError
from monoflow.source import OpInfo


def verify_graph(captured: Captured, after: str) -> None:
    """Raises GraphError, which names the pass `after` and the first node that breaks a rule."""
    graph = captured.graph.graph
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as exc:
        raise GraphError(f"after {after}: the graph is not well-formed: {exc}") from exc
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(captured.inputs):
        raise GraphError(
            f"after {after}: {len(placeholders)} placeholders for {len(captured.inputs)} inputs; a pass may not add or remove any"
        )
    outputs = graph.find_nodes(op="output")
    expected = captured.returned_count + len(captured.writes)
    if len(outputs) != 1 or not isinstance(outputs[0].args[0], tuple | list) or len(outputs[0].args[0]) != expected:
        raise GraphError(f"after {after}: the graph must have one output node, a tuple of {expected} values")
    for node in graph.nodes:
        if node.op == "call_function":
            _verify_call(node, after)
        elif node.op not in ("placeholder", "output"):
            raise GraphError(f"after {after}: {node.format_node()} is a {node.op}; only calls of functions are allowed")


def _verify_call(node: fx.Node, after: str) -> None:
    info = node.meta.get("op")
    if not isinstance(info, OpInfo) or not info.source:
        raise GraphError(f"after {after}: {describe_node(node)} has no OpInfo: give it one, or insert it before the op that it serves")
    if not callable(node.target):
        raise GraphError(f"after {after}: {describe_node(node)} calls something that is not a function")
    if "val" not in node.meta:
        raise GraphError(f"after {after}: {describe_node(node)} has no metadata of its result")
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise GraphError(f"after {after}: {describe_node(node)} is a sparse tensor")
