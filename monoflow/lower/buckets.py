"""Fewer, larger collectives: those of one kind that follow each other are joined.

Gradients of a training step are produced one by one through the backward pass; joined in buckets, they travel while the rest of it is
computed (Li et al., 2020: PyTorch Distributed). Large values stay by themselves: to copy one into a bucket would take longer than to start
a collective.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensorMode, fake_mode_of
from monoflow.lower.emit import Emitter

BUCKET_BYTES = 25 * 2**20
"""Size from which on a bucket is closed: large enough that latency does not count, small enough that the first leaves early."""

BUCKET = "bucket"
"""Key in a collective's meta: only those with the same value are joined."""

_aten = torch.ops.aten
_functional: Any = torch.ops._c10d_functional

WAIT = _functional.wait_tensor.default


def join(graph: fx.Graph, target: Any, largest: int, limit: int = BUCKET_BYTES) -> None:
    """Joins the collectives of one kind in place: values of less than `largest` bytes, until a bucket has `limit` bytes or is needed.

    The order of collectives depends on the graph alone, hence is the same on every rank.
    """
    for members in _buckets(graph, target, largest, limit):
        if len(members) > 1:
            _join(graph, members)


@dataclass(slots=True)
class _Open:
    """A bucket that is being filled."""

    members: list[fx.Node] = field(default_factory=list)
    size: int = 0


def _buckets(graph: fx.Graph, target: Any, largest: int, limit: int) -> list[list[fx.Node]]:
    """Collectives that follow each other, until the bucket is full or one of them is needed."""
    closed: list[list[fx.Node]] = []
    by_kind: dict[Hashable, _Open] = {}
    kind_of: dict[fx.Node, Hashable] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            kind = kind_of.get(source)
            if kind is not None and kind in by_kind and node.target is not WAIT:
                closed.append(by_kind.pop(kind).members)
        if node.target is WAIT and node.args[0] in kind_of:
            source = node.args[0]
            kind = kind_of[source]
            if kind in by_kind and source in by_kind[kind].members:
                kind_of[node] = kind  # who uses what is waited for needs the bucket
        elif node.target is target:
            size = bytes_of(node)
            if size >= largest:
                continue
            kind = (node.args[1:], node.meta["val"].dtype, node.meta.get(BUCKET))
            kind_of[node] = kind
            opened = by_kind.setdefault(kind, _Open())
            opened.members.append(node)
            opened.size += size
            if opened.size >= limit:
                closed.append(by_kind.pop(kind).members)
    return closed + [opened.members for opened in by_kind.values()]


def bytes_of(node: fx.Node) -> int:
    """Of the larger of a collective's argument and result."""
    source: Any = node.args[0]
    return max(value.numel() * value.element_size() for value in (source.meta["val"], node.meta["val"]))


def _join(graph: fx.Graph, members: list[fx.Node]) -> None:
    """One collective in the place of several; their results are views of its result, or copied out of it."""
    last = members[-1]
    emit = Emitter(graph, fake_mode_of([last.meta["val"]]) or FakeTensorMode())
    emit.info = last.meta.get("op")
    with graph.inserting_before(last.next):
        results = _FORMS[last.target](emit, members)
    # only now: the node that new ones were put before may be one of those that go
    for member, result in zip(members, results, strict=True):
        for wait in list(member.users):
            wait.replace_all_uses_with(result)
            graph.erase_node(wait)
        graph.erase_node(member)


def _communicate(emit: Emitter, member: fx.Node, value: fx.Node) -> fx.Node:
    """The joined collective, with the other arguments of one of its members, and the wait for it."""
    started = emit.call(member.target, value, *member.args[1:])
    if BUCKET in member.meta:
        started.meta[BUCKET] = member.meta[BUCKET]
    return emit.call(WAIT, started)


def _parts(emit: Emitter, joined: fx.Node, members: list[fx.Node], sizes: list[int], dim: int, reshape: Any) -> list[fx.Node]:
    """The members' results in the joined one, side by side in `dim`."""
    split = emit.call(_aten.split_with_sizes.default, joined, sizes, dim)
    results = []
    for index, member in enumerate(members):
        emit.info = member.meta.get("op")
        part = emit.node(operator.getitem, (split, index), {}, split.meta["val"][index])
        results.append(emit.call(reshape, part, list(member.meta["val"].shape)))
    return results


def _all_reduces(emit: Emitter, members: list[fx.Node]) -> list[fx.Node]:
    flat = [emit.call(_aten.reshape.default, m.args[0], [-1]) for m in members]
    reduced = _communicate(emit, members[-1], emit.call(_aten.cat.default, flat))
    return _parts(emit, reduced, members, [m.meta["val"].numel() for m in members], 0, _aten.view.default)


def _all_gathers(emit: Emitter, members: list[fx.Node]) -> list[fx.Node]:
    """Every rank's pieces come one after the other, so that the members lie in columns."""
    flat = [emit.call(_aten.reshape.default, m.args[0], [-1]) for m in members]
    gathered = _communicate(emit, members[-1], emit.call(_aten.cat.default, flat))
    columns = emit.call(_aten.view.default, gathered, [members[-1].args[1], -1])
    return _parts(emit, columns, members, [f.meta["val"].numel() for f in flat], 1, _aten.reshape.default)


def _reduce_scatters(emit: Emitter, members: list[fx.Node]) -> list[fx.Node]:
    """The pieces for one rank lie in a row."""
    parts = members[-1].args[2]
    rows = [emit.call(_aten.view.default, m.args[0], [parts, m.meta["val"].numel()]) for m in members]
    joined = emit.call(_aten.view.default, emit.call(_aten.cat.default, rows, 1), [-1])
    scattered = _communicate(emit, members[-1], joined)
    return _parts(emit, scattered, members, [m.meta["val"].numel() for m in members], 0, _aten.view.default)


_FORMS: dict[Any, Callable[[Emitter, list[fx.Node]], list[fx.Node]]] = {
    _functional.all_reduce.default: _all_reduces,
    _functional.all_gather_into_tensor.default: _all_gathers,
    _functional.reduce_scatter_tensor.default: _reduce_scatters,
}
"""Collective -> several of them as one."""
