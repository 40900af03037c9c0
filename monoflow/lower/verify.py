"""What a rank's graph must be like, checked after it has been made.

1. No hint of a layout is left: layouts have become collectives.
2. Every op knows its value, and where it comes from.
3. A collective runs in the background: nothing but a wait uses its result.
4. What a control edge names comes before it, and inputs are not gathered more buckets ahead of their use than the schedule allows.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from monoflow.capture.graph import describe_node, is_collective, is_wait
from monoflow.control_edge import after
from monoflow.errors import GraphError
from monoflow.layout.lay_out import Schedule
from monoflow.layout_hint import is_hint
from monoflow.lower.buckets import BUCKET
from monoflow.source import OpInfo


def verify_rank_graph(graph: fx.Graph, schedule: Schedule) -> None:
    """Raises: GraphError that names the op, its line and the rule it breaks."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    started: dict[int, int] = {}
    used: dict[int, int] = {}
    for node, at in position.items():
        if node.op != "call_function":
            continue
        _require(not is_hint(node.target), node, "a layout hint is left in a rank's graph")
        _require("val" in node.meta and isinstance(node.meta.get("op"), OpInfo), node, "it does not know its value or its source")
        _require(all(position[n] < at for n in node.all_input_nodes), node, "it comes before something that it takes, or must come after")
        target: Any = node.target
        if is_collective(target):
            _require(all(is_wait(user.target) for user in node.users), node, "its result is used before it has been waited for")
            if BUCKET in node.meta:
                started.setdefault(node.meta[BUCKET], at)
                for wait in node.users:
                    used[node.meta[BUCKET]] = min(position[wait], used.get(node.meta[BUCKET], position[wait]))
        elif target is after:
            _require(bool(node.args[1]), node, "a control edge that names nothing")
    for bucket, at in started.items():
        earlier = bucket - schedule.prefetch - 1
        if earlier in used and used[earlier] > at:
            raise GraphError(f"bucket {bucket} of gathered inputs starts before bucket {earlier} is used: {schedule.prefetch} may be ahead")


def _require(held: bool, node: fx.Node, rule: str) -> None:
    if not held:
        raise GraphError(f"{describe_node(node)}: {rule}")
