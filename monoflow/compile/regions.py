"""Cuts a graph into regions for a compiler, so that repeated blocks of a model become equal regions, compiled once.

A *region* is a stretch of ops without effects. Blocks are found by module path: `h.3.attn.qkv` belongs to block `h.3`. A
block is a region of its own only if another block has the same ops; everything else between is joined to the longest
regions possible.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import is_collective, memory_of, phase_of, written_nodes
from monoflow.schema import bind_arguments, is_random
from monoflow.source import OpInfo

_aten = torch.ops.aten

MIN_BLOCK = 8
"""Ops below which a repeated block is not worth a call of its own: a compiled region costs some ten microseconds to call."""

MIN_REGION = 5
"""Ops below which a region is not worth compiling (about a second each): its ops run as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Ops that are compiled together, the values they take from outside, and those that are used outside."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The graph in a new order: regions, and single ops that run as they are."""

    parts: tuple[Region | fx.Node, ...]


def plan_regions(graph: fx.Graph) -> Plan:
    """Orders and groups all call nodes. Ops with effects keep their order among each other."""
    _items_beside_source(graph)
    runs = _Runs(_sent(graph))
    for node in graph.nodes:
        if node.op == "call_function":
            runs.add(node)
    runs.close()
    stretches = [part if isinstance(part, fx.Node) else _by_block(part) for part in runs.parts]
    blocks = [block for part in stretches if isinstance(part, list) for block in part]
    repeated = Counter(_shape_of(block) for _, block in blocks)
    parts: list[list[fx.Node] | fx.Node] = []
    for part in stretches:
        if isinstance(part, fx.Node):
            parts.append(part)
        else:
            parts.extend(_joined(part, repeated))
    return Plan(tuple(_region_or_ops(parts)))


_PACKING = frozenset(
    (
        _aten.cat.default,
        _aten.clone.default,
        _aten.constant_pad_nd.default,
        _aten.contiguous.default,
        _aten.repeat.default,
        _aten.reshape.default,
    )
)


def _sent(graph: fx.Graph) -> set[fx.Node]:
    """Ops that only put together what a collective takes. Most of them do nothing, or copy once; as regions they would all be copies."""
    found: set[fx.Node] = set()
    for node in reversed([*graph.nodes]):
        moves = node.target in _PACKING or (isinstance(node.target, OpOverload) and node.target.is_view)
        if moves and node.users and all(user in found or is_collective(user.target) for user in node.users):
            found.add(node)
    return found


def _items_beside_source(graph: fx.Graph) -> None:
    """Takes the results of an op that has several next to it: what leaves a region is single tensors."""
    for node in reversed([*graph.nodes]):
        if node.target is operator.getitem:
            node.args[0].append(node)


def _region_or_ops(parts: list[list[fx.Node] | fx.Node]) -> Iterator[Region | fx.Node]:
    for part in parts:
        if isinstance(part, fx.Node):
            yield part
        elif len(part) < MIN_REGION:
            yield from part
        else:
            yield make_region(part)


def make_region(nodes: list[fx.Node]) -> Region:
    """The region of these ops: what they need from outside is its input, what is needed outside its output."""
    inside = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = [node for node in nodes if any(user not in inside for user in node.users) and not isinstance(node.meta["val"], list | tuple)]
    return Region(tuple(nodes), tuple(inputs), tuple(outputs))


def region_key(region: Region) -> Hashable:
    """Equal for regions that compute the same function of inputs with the same metadata."""
    numbers = {node: i for i, node in enumerate([*region.inputs, *region.nodes])}

    def local(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return ("%", numbers[value])
        if isinstance(value, list | tuple):
            return tuple(map(local, value))
        return (type(value), str(value))

    ops = tuple((str(n.target), local(n.args), tuple((k, local(v)) for k, v in n.kwargs.items())) for n in region.nodes)
    return (
        tuple(_tensor_key(n.meta["val"]) for n in region.inputs),
        ops,
        tuple(numbers[n] for n in region.outputs),
        tuple(_tensor_key(n.meta["val"]) for n in region.outputs),
    )


def _tensor_key(value: torch.Tensor) -> Hashable:
    return (tuple(value.shape), value.stride(), value.dtype, value.device)


def compilable(node: fx.Node) -> bool:
    """True for ops that may be part of a region: ATen ops on tensors, without randomness, outside the update."""
    if phase_of(node) == "update":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or _draws(node):
        return False
    if any(isinstance(n.meta.get("val"), int | float) for n in node.all_input_nodes):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [*values, *(n.meta.get("val") for n in node.all_input_nodes)]
    dense = all(v.layout is torch.strided for v in tensors if isinstance(v, torch.Tensor))
    return dense and bool(values) and all(isinstance(v, torch.Tensor) for v in values)


def _draws(node: fx.Node) -> bool:
    """True if the op draws random numbers. Attention kernels do only with dropout."""
    target: Any = node.target
    if not is_random(target):
        return False
    return bool(bind_arguments(target, node.args, node.kwargs).get("dropout_p", 1) != 0)


class _Runs:
    """Collects compilable ops into long runs; other ops move before the open run where they do not depend on it."""

    def __init__(self, excluded: set[fx.Node]) -> None:
        self._excluded = excluded
        self.parts: list[list[fx.Node] | fx.Node] = []
        self._run: list[fx.Node] = []
        self._inside: set[fx.Node] = set()
        self._storages: set[int] = set()
        self._written: set[int] = set()

    def add(self, node: fx.Node) -> None:
        if node not in self._excluded and compilable(node) and not (node.target is operator.getitem and node.args[0] not in self._inside):
            self._run.append(node)
            self._inside.add(node)
            self._storages |= set(memory_of([node, *node.all_input_nodes]))
            self._written |= set(memory_of(written_nodes(node)))
            return
        if self._depends(node):
            self.close()
        self.parts.append(node)

    def _depends(self, node: fx.Node) -> bool:
        if not self._inside.isdisjoint(node.all_input_nodes):
            return True
        writes_here = not self._storages.isdisjoint(memory_of(written_nodes(node)))
        return writes_here or not self._written.isdisjoint(memory_of(node.all_input_nodes))

    def close(self) -> None:
        if self._run:
            self.parts.append(self._run)
            self._run, self._inside, self._storages, self._written = [], set(), set(), set()


def _block(node: fx.Node) -> str | None:
    """Phase and block of a model's module. One result of several is where the op is."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    info = node.meta.get("op")
    return f"{info.phase} {info.block}" if isinstance(info, OpInfo) and info.block else None


def _by_block(run: list[fx.Node]) -> list[tuple[str | None, list[fx.Node]]]:
    """The run in stretches of one block each."""
    return [(block, list(nodes)) for block, nodes in itertools.groupby(run, _block)]


def _shape_of(block: list[fx.Node]) -> Hashable:
    return region_key(make_region(block))


def _joined(blocks: list[tuple[str | None, list[fx.Node]]], repeated: Counter[Hashable]) -> Iterator[list[fx.Node]]:
    """Repeated blocks of some size alone, all others joined."""
    rest: list[fx.Node] = []
    for name, nodes in blocks:
        if name is not None and len(nodes) >= MIN_BLOCK and repeated[_shape_of(nodes)] > 1:
            if rest:
                yield rest
                rest = []
            yield nodes
        else:
            rest.extend(nodes)
    if rest:
        yield rest
