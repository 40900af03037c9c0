"""Puts in-place ops back where nobody can notice, so that an update writes into the parameter and its state as it was written by the user.

Lowered graphs write only at their end, by `copy_(placeholder, value)`. Where the value was computed from the placeholder by a chain of
ops with in-place twins, and nobody reads what they overwrite afterwards, the chain works in the placeholder's memory and the copy goes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from monoflow._torch import storage_id
from monoflow.capture.graph import done_at, fake_mode_of_graph, only_looks, overlap
from monoflow.schema import bind_arguments, inplace_twin

_aten = torch.ops.aten
_copy = torch.ops.aten.copy_.default


def restore_inplace(graph: fx.Graph) -> None:
    """Rewrites one rank's graph in place. Results are the same to the bit."""
    readers = _Readers(graph)
    copies = {n.args[0]: n for n in graph.find_nodes(op="call_function", target=_copy) if n.args[0].op == "placeholder"}
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), list | tuple):
            _restore_list(graph, node, copies, readers)
    for target, copy in list(copies.items()):
        chain = _chain(target, copy, readers)
        if chain:
            for node in reversed(chain):
                readers.write_over(node)
            graph.erase_node(copy)
    for node in graph.nodes:
        if "written" in node.meta and _may_write_over(node, readers):
            readers.write_over(node)


def _may_write_over(node: fx.Node, readers: _Readers) -> bool:
    """True for an op that the user wrote in place, where nobody reads what it overwrites: a value made in the graph."""
    before: Any = node.args[0] if node.args else None
    if inplace_twin(node.target) is None or not isinstance(before, fx.Node) or not _alike(before, node):
        return False
    group = readers.sharing[storage_id(before.meta["val"])]
    if any(alias.op == "placeholder" for alias in group) or any(a is before for a in node.args[1:]):
        return False
    return readers.last_before(before, node)


class _Readers:
    """Who reads the memory of a value, and when."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.mode = fake_mode_of_graph(graph)
        self.sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self.sharing.setdefault(storage_id(value), []).append(node)

    def write_over(self, node: fx.Node) -> None:
        """`node` becomes its in-place twin: its result, and what is a view of it, lie in the memory of its first argument from here on."""
        before: Any = node.args[0]
        node.target = inplace_twin(node.target) or node.target
        moved = sorted(self.sharing.pop(storage_id(node.meta["val"])), key=self.position.__getitem__)
        node.meta["val"] = before.meta["val"]
        group = self.sharing[storage_id(before.meta["val"])]
        for alias in moved:
            if alias is not node:
                args, kwargs = fx.node.map_arg((alias.args, alias.kwargs), lambda n: n.meta["val"])
                with self.mode, torch.no_grad():
                    alias.meta["val"] = alias.target(*args, **kwargs)  # type: ignore[operator]
            group.append(alias)

    def is_overwritten(self, value: fx.Node, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> bool:
        """True when `node` may write where `value` lies: nobody reads it later, and if it is an input's memory, that gets its new value."""
        inputs = [a for a in self.sharing[storage_id(value.meta["val"])] if a.op == "placeholder"]
        if any(a is value or a not in copies for a in inputs):
            return False
        return self.last_before(value, node, copies[inputs[0]] if inputs else None)

    def last_before(self, value: fx.Node, node: fx.Node, allowed: fx.Node | None = None) -> bool:
        """True when nothing reads the memory of `value` after `node`, other than `allowed`."""
        at = self.position[node]
        group = [a for a in self.sharing[storage_id(value.meta["val"])] if overlap(a.meta["val"], value.meta["val"])]
        for alias in group:
            if any(done_at(user, self.position) > at and user is not allowed and not only_looks(user, alias) for user in alias.users):
                return False
        return not any(alias is not value and alias in node.all_input_nodes for alias in group)


def _chain(target: fx.Node, copy: fx.Node, readers: _Readers) -> list[fx.Node]:
    """The ops from `target` to the value that is copied into it, if all of them may work in place; else nothing."""
    chain: list[fx.Node] = []
    node: Any = copy.args[1]
    while node is not target:
        if not isinstance(node, fx.Node) or node.op != "call_function" or not node.args or inplace_twin(node.target) is None:
            return []
        before: Any = node.args[0]
        if not isinstance(before, fx.Node) or not _alike(before, node) or any(a is before for a in node.args[1:]):
            return []
        if not readers.last_before(before, node, copy if before is target else None):
            return []
        chain.append(node)
        node = before
    return chain


def _alike(before: fx.Node, after: fx.Node) -> bool:
    one, other = before.meta.get("val"), after.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _restore_list(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], readers: _Readers) -> None:
    """An op on lists (fused and foreach updates) whose every used result is copied into the argument that it is the new value of."""
    twin = inplace_twin(node.target)
    if twin is None:
        return
    bound = bind_arguments(twin, node.args, node.kwargs)
    written = [a.name for a in twin._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    single = bool(node.meta["val"]) and isinstance(node.meta["val"][0], torch.Tensor)
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for item in node.users:
        index: Any = item.args[1] if item.target is operator.getitem else None
        if index is None:
            return
        if single:
            pairs.append((item, bound[written[0]][index]))
            continue
        values = bound[written[index]]
        pairs.extend((one, values[one.args[1]]) for one in item.users)
    ends: list[tuple[fx.Node, fx.Node, fx.Node | None]] = []
    for result, value in pairs:
        copy = copies.get(value)
        if copy is not None and copy.args[1] is result and _alike(value, result) and readers.last_before(value, node, copy):
            ends.append((result, value, copy))
        elif result.users:
            if not _alike(value, result) or not readers.is_overwritten(value, node, copies):
                return
            ends.append((result, value, None))
    untouched = [v for name in written for v in bound[name] if v not in [value for _, value, _ in ends]]
    if any(not readers.last_before(v, node) or v.op == "placeholder" for v in untouched if isinstance(v, fx.Node)):
        return
    node.target = twin
    for result, value, copy in ends:
        if copy is not None:
            graph.erase_node(copy)
            del copies[value]
        result.replace_all_uses_with(value)
    for item in list(node.users):
        for one in list(item.users):
            graph.erase_node(one)
        graph.erase_node(item)
