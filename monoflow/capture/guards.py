"""Guards: the comparisons Python made on numbers while the step was captured, as a small graph to check before each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monoflow.capture.known import KnownValues


def guard_module(graph: fx.Graph, known: KnownValues) -> fx.GraphModule | None:
    """A graph over the placeholders of `graph` whose outputs are True while every comparison comes out as it did at capture.

    It holds the number ops that the comparisons need and, when these read tensors (an optimizer's step counts), all recorded ops on
    such tensors, run on copies. None when nothing was compared.
    """
    if not known.guards:
        return None
    needed = _needed([o for key in known.guards for o in key[1:] if isinstance(o, fx.Node)])
    if needed & known.tensors:
        needed |= {n for n in known.ops if not known.tensors.isdisjoint(n.all_input_nodes)}
        needed |= _needed(list(needed))
    guards = fx.Graph()
    copies = {node: guards.placeholder(node.name) for node in graph.find_nodes(op="placeholder")}
    for node in list(copies):
        if node in needed and node in known.tensors:
            copies[node] = guards.call_function(torch.clone, (copies[node],))
    for node in known.ops:
        if node in needed:
            copies[node] = guards.node_copy(node, lambda n: copies[n])
    answers = [_comparison(guards, key, answer, copies) for key, answer in known.guards.items()]
    guards.output(tuple(answers))
    return fx.GraphModule(torch.nn.Module(), guards)


def _comparison(graph: fx.Graph, key: tuple[Any, ...], answer: bool, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    function, *operands = key
    compared = graph.call_function(function, tuple(copies[o] if isinstance(o, fx.Node) else o for o in operands))
    return graph.call_function(_is, (compared, answer))


def _is(value: object, expected: bool) -> bool:
    return bool(value) is expected


def _needed(roots: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    while roots:
        node = roots.pop()
        if node not in found:
            found.add(node)
            roots.extend(node.all_input_nodes)
    return found
