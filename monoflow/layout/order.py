"""One order of ops for all ranks.

Each process captures the step by itself, and a program that walks over a Python set walks in another order in another process: the same
ops, in another order. Collectives must come in one order, so all ranks take that of the first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import Captured, StepGraph
from monoflow.schema import is_random
from monoflow.source import OpInfo


def marks_of(captured: Captured) -> list[str]:
    """For each op, in order, what it is: its target, its arguments down to the inputs, its module and line. Equal in every process."""
    marks: dict[fx.Node, str] = {}
    for node in captured.graph.graph.nodes:
        info = node.meta.get("op")
        source = f"{info.module} {info.user}" if isinstance(info, OpInfo) else ""
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Mark(marks[n]))
        text = f"{node.op} {_target_text(node)} {arguments} {source}"
        marks[node] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return list(marks.values())


class _Mark(str):
    """Stands for a node in the text of its users."""

    def __repr__(self) -> str:
        return str(self)


def _target_text(node: fx.Node) -> str:
    if isinstance(node.target, str | OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__qualname__", node.target))


def in_order(captured: Captured, marks: Sequence[str]) -> Captured:
    """The same functional graph with its ops in the order of `marks`, which another rank's ops have.

    As it is, where its ops are not those, or where it draws random numbers twice in a way that cannot be told apart.
    """
    own = marks_of(captured)
    draws = Counter(m for m, n in zip(own, captured.graph.graph.nodes, strict=True) if is_random(n.target))
    if Counter(own) != Counter(marks) or any(count > 1 for count in draws.values()):
        return captured
    waiting: dict[str, deque[fx.Node]] = defaultdict(deque)
    for mark, node in zip(own, captured.graph.graph.nodes, strict=True):
        waiting[mark].append(node)
    mark_of = dict(zip(captured.graph.graph.nodes, own, strict=True))
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for mark in marks:
        node = waiting[mark].popleft()
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: made[mark_of[n]])
        name = node.name if node.op == "placeholder" else None  # others are named by their order
        copy = graph.create_node(node.op, node.target, args, kwargs, name)
        copy.meta.update({k: made[mark_of[v]] if isinstance(v, fx.Node) else v for k, v in node.meta.items()})
        made.setdefault(mark, copy)  # of ops that are the same, the first serves all users
    return dataclasses.replace(captured, graph=StepGraph(torch.nn.Module(), graph))
