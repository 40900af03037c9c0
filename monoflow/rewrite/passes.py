"""Applies the user's passes: functions over the captured graph, each followed by the verifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from monoflow._torch import bare_mode, fake_mode_of
from monoflow.capture.graph import Captured, StepGraph, describe_node
from monoflow.capture.verify import verify_graph
from monoflow.errors import GraphError
from monoflow.source import OpInfo

Pass = Callable[[StepGraph], StepGraph | None]
"""Changes the graph it is given and returns it (or None, which means the same)."""


def apply_passes(captured: Captured, passes: Iterable[Pass]) -> Captured:
    """Runs the passes in order. New ops inherit the `OpInfo` of what they serve, and get the metadata of their result.

    Raises: GraphError naming the pass after which the graph breaks a rule of `monoflow.capture.verify`.
    """
    for user_pass in passes:
        name = getattr(user_pass, "__name__", type(user_pass).__name__)
        graph = user_pass(captured.graph) or captured.graph
        if not isinstance(graph, StepGraph):
            raise GraphError(f"after pass {name}: a pass returns the graph it was given (a StepGraph), got {type(graph).__name__}")
        _complete(graph.graph, name)
        graph.recompile()
        captured = dataclasses.replace(captured, graph=graph)
        verify_graph(captured, f"pass {name}")
    return captured


def _complete(graph: fx.Graph, name: str) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            if "op" not in node.meta:
                _inherit(node)
            if "val" not in node.meta:
                _propagate(node, name)


def _inherit(node: fx.Node) -> None:
    """The `OpInfo` of the op that uses the node, else of an op whose result it uses."""
    for neighbour in [*node.users, *node.all_input_nodes]:
        info = neighbour.meta.get("op")
        if isinstance(info, OpInfo):
            node.meta["op"] = info
            return


def _propagate(node: fx.Node, name: str) -> None:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    mode = fake_mode_of(values)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    target: Any = node.target
    try:
        if mode is None:
            node.meta["val"] = target(*args, **kwargs)
        else:
            with bare_mode(mode), torch.no_grad():
                node.meta["val"] = target(*args, **kwargs)
    except Exception as exc:
        raise GraphError(f"after pass {name}: {describe_node(node)} fails on its inputs: {exc}") from exc
