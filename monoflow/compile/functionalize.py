"""Small local rewrites that make stretches of a graph free of side effects, so that a compiler can take them.

1. `y = x.op_(...)` becomes `y = op(x, ...)` where `x` is a fresh tensor of the graph that nobody else sees afterwards.
2. `empty_like(x)` becomes an `empty_strided` that does not depend on `x`, so that random numbers can be drawn before `x` is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from monoflow._torch import OpOverload, storage_id
from monoflow.capture.graph import done_at, only_looks, overlap, written_nodes
from monoflow.schema import functional_twin, is_random

_aten = torch.ops.aten


def functionalize(graph: fx.Graph, chosen: Callable[[fx.Node], bool]) -> None:
    """Applies both rewrites in place, the first to the `chosen` ops. Results are the same to the bit."""
    for node in graph.find_nodes(op="call_function", target=_aten.empty_like.default):
        _make_independent(graph, node)
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and chosen(node) and aliases.is_private_write(node):
            twin = _twin_of(node)
            if twin is not None:
                node.target = twin


def _make_independent(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta["val"]
    with graph.inserting_before(node):
        fresh = graph.call_function(
            _aten.empty_strided.default, (list(value.shape), list(value.stride())), {"dtype": value.dtype, "device": value.device}
        )
    fresh.meta.update(node.meta)
    node.replace_all_uses_with(fresh)
    graph.erase_node(node)


class Aliases:
    """Which nodes share memory, by the storage identity of their metadata."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.by_storage: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                self.by_storage.setdefault(storage_id(value), []).append(node)

    def is_private_write(self, node: fx.Node) -> bool:
        """True when nothing but `node` sees its one written argument after `node` has run."""
        written = written_nodes(node)
        if len(written) != 1 or not isinstance(node.meta.get("val"), torch.Tensor) or written[0] is not node.args[0]:
            return False
        value, mine = written[0].meta["val"], node.meta["val"]
        if (value.dtype, value.shape) != (mine.dtype, mine.shape):
            return False
        for other in self.by_storage[storage_id(value)]:
            if other.op == "placeholder":
                return False
            if not overlap(other.meta["val"], value):
                continue
            writes_later = self.position[other] > self.position[node] and not _follows(other, node)
            used_later = other is not node and self.position[other] < self.position[node] and self._used_after(other, node)
            if writes_later or used_later:
                return False
        return True

    def ends_at(self, value: fx.Node, node: fx.Node) -> bool:
        """True when the memory of `value`, made inside the graph, is read for the last time by `node`, and only as `value`."""
        group = self.by_storage[self._storage(value)]
        if any(
            other.op == "placeholder" or self.position[other] >= self.position[node] or self._used_after(other, node) for other in group
        ):
            return False
        return not any(other is not value and other in group for other in node.all_input_nodes)

    def merge(self, value: fx.Node, node: fx.Node) -> None:
        """`node` now writes into the memory of `value`."""
        group = self.by_storage[self._storage(value)]
        group.extend(self.by_storage[self._storage(node)])
        for member in group:
            self.by_storage[self._storage(member)] = group

    def _storage(self, node: fx.Node) -> int:
        return storage_id(node.meta["val"])

    def _used_after(self, other: fx.Node, node: fx.Node) -> bool:
        return any(done_at(user, self.position) > self.position[node] and not only_looks(user, other) for user in other.users)


def _follows(node: fx.Node, ancestor: fx.Node) -> bool:
    """True when `node` is `ancestor` or a view or in-place result made from it."""
    while node is not ancestor:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        if not isinstance(node.target, OpOverload):
            return False
        node = node.args[0]
    return True


def _twin_of(node: fx.Node) -> OpOverload | None:
    """The functional form of an op of PyTorch's own that neither draws nor changes a tensor's shape."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not target._schema.name.endswith("_"):
        return None
    if is_random(target) or torch.Tag.inplace_view in target.tags:
        return None
    return functional_twin(target)
