"""Removes work that changes no number: detached aliases, double transposes, repeated arithmetic on numbers, copies of literals."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import is_effect, written_nodes
from monoflow.layout_hint import is_hint

_aten = torch.ops.aten


def simplify(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph with the same results to the bit, and fewer ops."""
    result = fx.Graph()
    output = result.graph_copy(graph, {})
    result.output(output)
    _remove_aliases(result)
    _remove_literal_copies(result)
    _share_numbers(result)
    result.eliminate_dead_code(is_effect)
    return result


def _remove_aliases(graph: fx.Graph) -> None:
    """`detach(x)` is `x` in a graph without autograd, unless the caller would get a parameter for it; `t(t(x))` is `x`."""
    for node in list(graph.nodes):
        if node.target in (_aten.detach.default, _aten.alias.default) or is_hint(node.target):
            if node.args[0].op == "placeholder" and any(user.op == "output" for user in node.users):
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _aten.t.default and node.args[0].target is _aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)


def _remove_literal_copies(graph: fx.Graph) -> None:
    """A literal (`torch.tensor(0.5)`) is copied on each call only if something may write into the copy or return it."""
    for node in graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default):
        if all(_only_reads(user, node) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _only_reads(user: fx.Node, node: fx.Node) -> bool:
    if user.op != "call_function" or node in written_nodes(user) or not isinstance(user.target, OpOverload):
        return False
    return all(r.alias_info is None for r in user.target._schema.returns)


def _share_numbers(graph: fx.Graph) -> None:
    """Arithmetic on numbers, done once for equal operands (each parameter of an optimizer repeats `1 - beta1`)."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), int | float):
            continue
        key = (node.target, node.args)
        try:
            known = first.setdefault(key, node)
        except TypeError:
            continue
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
