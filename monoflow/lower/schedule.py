"""When collectives start, and when they are waited for.

- What is reduced starts as soon as its value is there; at most one reduce-scatter is under way beside the one that starts, so that what
  it takes is freed soon.
- Inputs that are gathered (parameters in pieces) start a few buckets before their use, held back by control edges, so that no more of them
  are whole at any time (Rajbhandari et al., 2020: ZeRO; Zhao et al., 2023: PyTorch FSDP).
- Waits come as late as their first use.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, storage_id
from monoflow.capture.graph import is_collective, is_wait, memory_of, phase_of, written_nodes
from monoflow.control_edge import insert_after
from monoflow.layout.cost import Link
from monoflow.layout.lay_out import Schedule
from monoflow.lower.buckets import BUCKET, bytes_of, join
from monoflow.lower.ways import choose_ways

_aten = torch.ops.aten
_functional: Any = torch.ops._c10d_functional

ALL_REDUCE = _functional.all_reduce.default
ALL_GATHER = _functional.all_gather_into_tensor.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default


def order_communication(graph: fx.Graph, link: Link, schedule: Schedule) -> None:
    """Rewrites one rank's graph in place. The order of collectives depends on the graph alone, hence is the same on every rank."""
    closed_at = schedule.bucket_bytes or link.worthwhile
    _update_in_levels(graph)
    _issue_early(graph)
    _gather_in_turn(graph, link.worthwhile)
    _prefetch(graph, closed_at, schedule.prefetch)
    join(graph, ALL_REDUCE, link.worthwhile)
    join(graph, REDUCE_SCATTER, link.worthwhile, closed_at)
    join(graph, ALL_GATHER, link.worthwhile)
    _reduce_in_place(graph)
    _wait_late(graph)
    _wait_in_turn(graph)
    choose_ways(graph)


def _update_in_levels(graph: fx.Graph) -> None:
    """In the update, what waits for no all-reduce goes first, then what waits for one, and so on.

    So the norms of all gradients are reduced together.
    """
    levels: dict[fx.Node, int] = {}
    stretch: list[fx.Node] = []
    for node in [*graph.nodes]:
        if phase_of(node) == "update":
            levels[node] = max((levels.get(n, 0) for n in node.all_input_nodes), default=0) + (node.target is ALL_REDUCE)
            if not written_nodes(node):
                stretch.append(node)
                continue
        for one in sorted(stretch, key=levels.__getitem__):
            node.prepend(one)
        stretch = []


def _reduce_in_place(graph: fx.Graph) -> None:
    """A value that nobody else needs is reduced where it is: the functional op would copy it first."""
    sharing = Counter(memory_of(graph.nodes))
    for node in graph.find_nodes(op="call_function", target=ALL_REDUCE):
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
    """Moves every reduction, with what prepares its value, to just behind the op that makes it; those of one value keep their order."""
    for node in [*graph.nodes]:
        if node.target in (ALL_REDUCE, REDUCE_SCATTER):
            chain, origin = _chain(node)
            if origin.op != "placeholder":
                for one in chain:
                    origin.append(one)


def _gather_in_turn(graph: fx.Graph, largest: int) -> None:
    """New pieces of the state: small ones start as early, to be joined; a large one starts before the wait for the one before."""
    before: fx.Node | None = None
    for node in graph.find_nodes(op="call_function", target=ALL_GATHER):
        chain, origin = _chain(node)
        if phase_of(node) != "update" or origin.op == "placeholder":
            continue
        if bytes_of(node) < largest:
            for one in chain:
                origin.append(one)
            continue
        if before is not None and origin < before < node:
            for one in reversed(chain):
                before.prepend(one)
        before = min(node.users)


def _chain(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """A collective and the ops that prepare its value for nobody else, last one first; and the value."""
    chain = [node]
    value: Any = node.args[0]
    while _prepares(value) and len(value.users) == 1:
        chain.append(value)
        value = value.args[0]
    return chain, value


_PREPARING = frozenset(
    (_aten.constant_pad_nd.default, _aten.contiguous.default, _aten._to_copy.default, _aten.clone.default, _aten.reshape.default)
)


def _prepares(node: fx.Node) -> bool:
    """True for an op that only moves a value, or casts it."""
    return node.target in _PREPARING or (isinstance(node.target, OpOverload) and node.target.is_view and len(node.all_input_nodes) == 1)


# Inputs that are gathered


@dataclass(slots=True)
class _Bucket:
    """Gathers that start together; `use` is the op that takes the first of them, in `phase`."""

    use: fx.Node
    phase: str
    gathers: list[fx.Node] = field(default_factory=list)
    size: int = 0


def _prefetch(graph: fx.Graph, closed_at: int, ahead: int) -> None:
    """Inputs are gathered when the bucket that is used `ahead` buckets earlier comes into use."""
    buckets = list(_gathered_inputs(graph, closed_at))
    made = [_made_last(bucket.use) for bucket in buckets]
    for number, bucket in enumerate(buckets):
        at = max(number - ahead, 0)
        before = made[at] if number >= ahead else None
        for gather in bucket.gathers:
            gather.meta[BUCKET] = number
            chain, value = _chain(gather)
            for one in reversed(chain):
                buckets[at].use.prepend(one)
            if before is not None:
                insert_after(value, [before], chain[-1])


def _gathered_inputs(graph: fx.Graph, closed_at: int) -> Iterator[_Bucket]:
    """In the order of use. A bucket ends when it is large enough, and where another phase begins; what one op takes starts together."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    gathers = [n for n in graph.find_nodes(op="call_function", target=ALL_GATHER) if _chain(n)[1].op == "placeholder"]
    uses = {node: min(users, key=position.__getitem__) for node in gathers if (users := _users(node))}
    bucket: _Bucket | None = None
    last: fx.Node | None = None
    for node in sorted(uses, key=lambda n: position[uses[n]]):
        use, phase = uses[node], phase_of(node)
        if bucket is not None and use is not last and (bucket.size >= closed_at or phase != bucket.phase):
            yield bucket
            bucket = None
        bucket = bucket or _Bucket(use, phase)
        bucket.gathers.append(node)
        bucket.size += bytes_of(node)
        last = use
    if bucket is not None:
        yield bucket


def _users(gather: fx.Node) -> list[fx.Node]:
    """The ops that compute with a gathered value: what waits for it and only moves it is passed over."""
    found: list[fx.Node] = []
    for user in gather.users:
        found += _users(user) if is_wait(user.target) or _prepares(user) else [user]
    return found


def _made_last(use: fx.Node) -> fx.Node | None:
    """What is computed last before a gathered input comes into use: of the values that its user takes beside it, else of all."""
    found = max((n for n in use.all_input_nodes if _is_computed(n)), default=None)
    node = use.prev
    while found is None and node.op == "call_function":
        found = node if _is_computed(node) else None
        node = node.prev
    return found


def _is_computed(node: fx.Node) -> bool:
    """True for a tensor that is neither an input nor has just been communicated, nor is a view of such."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    while _prepares(node):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "call_function" and not (is_collective(node.target) or is_wait(node.target))


# Waits


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
        if is_wait(node.target):
            return True
        if node.target is not operator.getitem and not _prepares(node):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False


def _wait_in_turn(graph: fx.Graph) -> None:
    """Before a reduce-scatter starts, the one before the last has ended."""
    started = graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    started.sort()
    for earlier, node in zip(started, started[2:], strict=False):
        for wait in earlier.users:
            if wait > node:
                node.prepend(wait)
