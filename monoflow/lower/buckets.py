"""Fewer, larger all-reduces: each is issued as soon as its value is there, joined with its neighbours, and waited for at its first use.

Gradients of a training step are produced one by one through the backward pass and needed at its end; joined in buckets, they travel while
the rest of the backward pass is computed (Li et al., 2020: PyTorch Distributed).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensorMode, fake_mode_of, storage_id
from monoflow.capture.graph import memory_of, written_nodes
from monoflow.lower.emit import Emitter
from monoflow.source import OpInfo

JOINED_BYTES = 2 * 2**20
"""From this size on a value is reduced by itself, where it is: to copy it into a bucket would take longer than to start a collective."""

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket: large enough that latency does not count, small enough that the first leaves early."""

_aten = torch.ops.aten
_functional: Any = torch.ops._c10d_functional


def bucket(graph: fx.Graph, limit: int = BUCKET_BYTES) -> None:
    """Rewrites one rank's graph in place. The order of collectives depends on the graph alone, hence is the same on every rank."""
    _update_in_levels(graph)
    _issue_early(graph)
    for members in _buckets(graph, limit):
        if len(members) > 1:
            _join(graph, members)
    _reduce_in_place(graph)
    _wait_late(graph)


def _update_in_levels(graph: fx.Graph) -> None:
    """In the update, what waits for no all-reduce goes first, then what waits for one, and so on.

    So the norms of all gradients are reduced together.
    """
    levels: dict[fx.Node, int] = {}
    stretch: list[fx.Node] = []
    for node in [*graph.nodes]:
        levels[node] = max((levels[n] for n in node.all_input_nodes), default=0) + (node.target is _functional.all_reduce.default)
        info = node.meta.get("op")
        if node.op == "call_function" and isinstance(info, OpInfo) and info.phase == "update" and not written_nodes(node):
            stretch.append(node)
            continue
        for one in sorted(stretch, key=levels.__getitem__):
            node.prepend(one)
        stretch = []


def _reduce_in_place(graph: fx.Graph) -> None:
    """A value that nobody else needs is reduced where it is: the functional op would copy it first."""
    sharing = Counter(memory_of(graph.nodes))
    for node in graph.find_nodes(op="call_function", target=_functional.all_reduce.default):
        value: Any = node.args[0]
        if value.meta["val"].is_contiguous() and _is_private(value, sharing[storage_id(value.meta["val"])]):
            node.target = _functional.all_reduce_.default
            node.meta["val"] = value.meta["val"]


def _is_private(value: fx.Node, sharing: int) -> bool:
    """True for memory that was made in the graph and that nobody sees but `value`, through a chain of views that nobody else uses.

    `sharing` is the number of nodes that lie in it.
    """
    memory = storage_id(value.meta["val"])
    seen = 0
    while value.op == "call_function" and len(value.users) == 1:
        seen += 1
        source = value.args[0] if value.args else None
        held = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(held, torch.Tensor) or storage_id(held) != memory:
            return seen == sharing
        value = source  # type: ignore[assignment]
    return False


def _issue_early(graph: fx.Graph) -> None:
    """Moves every all-reduce to just behind the op that makes its value; those of one value keep their order."""
    for node in graph.find_nodes(op="call_function", target=_functional.all_reduce.default):
        value = node.args[0]
        if value.op != "placeholder":
            value.append(node)


@dataclass(slots=True)
class _Open:
    """A bucket that is being filled."""

    members: list[fx.Node] = field(default_factory=list)
    size: int = 0


def _buckets(graph: fx.Graph, limit: int) -> list[list[fx.Node]]:
    """All-reduces of one kind that follow each other, until the bucket is full or one of them is needed."""
    closed: list[list[fx.Node]] = []
    by_kind: dict[Hashable, _Open] = {}
    kind_of: dict[fx.Node, Hashable] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            kind = kind_of.get(source)
            if kind is not None and kind in by_kind and node.target is not _functional.wait_tensor.default:
                closed.append(by_kind.pop(kind).members)
        if node.target is _functional.wait_tensor.default and node.args[0] in kind_of:
            source = node.args[0]
            kind = kind_of[source]
            if kind in by_kind and source in by_kind[kind].members:
                kind_of[node] = kind  # who uses what is waited for needs the bucket
        elif node.target is _functional.all_reduce.default:
            value = node.meta["val"]
            if value.numel() * value.element_size() >= JOINED_BYTES:
                continue
            kind = (node.args[1], node.args[2], value.dtype)
            kind_of[node] = kind
            opened = by_kind.setdefault(kind, _Open())
            opened.members.append(node)
            opened.size += value.numel() * value.element_size()
            if opened.size >= limit:
                closed.append(by_kind.pop(kind).members)
    return closed + [opened.members for opened in by_kind.values()]


def _join(graph: fx.Graph, members: list[fx.Node]) -> None:
    """One all-reduce in the place of several; their results are views of its result."""
    last = members[-1]
    emit = Emitter(graph, fake_mode_of([last.meta["val"]]) or FakeTensorMode())
    emit.info = last.meta.get("op")
    with graph.inserting_before(last.next):
        flat = [emit.call(_aten.reshape.default, m.args[0], [-1]) for m in members]
        joined = emit.call(_aten.cat.default, flat)
        reduced = emit.call(_functional.all_reduce.default, joined, *last.args[1:])
        waited = emit.call(_functional.wait_tensor.default, reduced)
        sizes = [m.meta["val"].numel() for m in members]
        parts = emit.call(_aten.split_with_sizes.default, waited, sizes)
        shaped = []
        for index, member in enumerate(members):
            emit.info = member.meta.get("op")
            part = emit.node(operator.getitem, (parts, index), {}, parts.meta["val"][index])
            shaped.append(emit.call(_aten.view.default, part, list(member.meta["val"].shape)))
    for member, result in zip(members, shaped, strict=True):  # only now: the node that new ones were put before may be one of those that go
        for wait in list(member.users):
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
        graph.erase_node(member)


def _wait_late(graph: fx.Graph) -> None:
    """Moves waits, and the views of what is waited for, to just before their first use; results stay next to the op that has several."""
    late = {node for node in graph.nodes if _moves_with_wait(node)}
    order: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        if node in order:
            return
        for source in node.all_input_nodes:
            if source in late:
                place(source)
        if node in order:  # one of several results, placed with the op that has them
            return
        order[node] = None
        if isinstance(node.meta.get("val"), list | tuple):
            for item in node.users:
                if item in late:
                    place(item)

    for node in graph.nodes:
        if node not in late:
            place(node)
    for before, node in itertools.pairwise(order):
        before.append(node)


def _moves_with_wait(node: fx.Node) -> bool:
    while node.op == "call_function":
        if node.target is _functional.wait_tensor.default:
            return True
        if node.target not in (operator.getitem, _aten.split_with_sizes.default, _aten.view.default):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False
