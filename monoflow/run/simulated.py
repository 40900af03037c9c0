"""Ranks without processes: the ranks' graphs run in lockstep inside this process, op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed  # registers the ops
from torch import fx

from monoflow.capture.graph import last_uses
from monoflow.lower.collectives import mesh_dim_of
from monoflow.rng import DrawPiece
from monoflow.schema import is_random

functional: Any = torch.ops._c10d_functional

Values = list[Any]
"""One value for each rank."""


def run_lockstep(graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Any]], mesh_shape: tuple[int, ...]) -> list[list[Any]]:
    """Runs one graph for each rank of a mesh, ranks in row-major order, and returns each rank's flat outputs.

    The graphs have the same nodes; numbers in their arguments may differ. A collective of group `mesh1` combines the values of the ranks
    that differ in mesh dimension 1 only. Random ops draw on every rank what the first one draws, and PyTorch's generator advances once.
    Values are freed after their last use. Raises ValueError where the graphs or the inputs do not fit.
    """
    if len(graphs) != math.prod(mesh_shape) or len(inputs) != len(graphs):
        raise ValueError(f"a mesh {mesh_shape} needs {math.prod(mesh_shape)} graphs and as many lists of inputs")
    rows = _rows(graphs)
    place = {node: position for position, row in enumerate(rows) for node in row}
    frees = last_uses(row[0] for row in rows)
    groups = [_groups(mesh_shape, dim) for dim in range(len(mesh_shape))]
    waiting = [iter(given) for given in inputs]
    values: dict[int, Values] = {}

    def filled(arguments: Any, rank: int) -> Any:
        return fx.node.map_arg(arguments, lambda node: values[place[node]][rank])

    for position, row in enumerate(rows):
        first = row[0]
        if first.op == "output":
            return [list(filled(node.args[0], rank)) for rank, node in enumerate(row)]
        if first.op == "placeholder":
            values[position] = [next(given) for given in waiting]
        else:
            arguments = [filled((node.args, node.kwargs), rank) for rank, node in enumerate(row)]
            values[position] = _call([node.target for node in row], arguments, groups)
            del arguments
        for node in frees.get(first, ()):
            del values[place[node]]
    raise ValueError("the graphs have no output")


def _rows(graphs: Sequence[fx.Graph]) -> list[tuple[fx.Node, ...]]:
    rows = list(zip(*(graph.nodes for graph in graphs), strict=True))
    for row in rows:
        if any(node.op != row[0].op or not _same_target(node, row[0]) for node in row if node.op == "call_function"):
            raise ValueError(f"the ranks' graphs differ: {', '.join(dict.fromkeys(node.format_node() or node.name for node in row))}")
    return rows


def _same_target(one: fx.Node, other: fx.Node) -> bool:
    if isinstance(one.target, DrawPiece) and isinstance(other.target, DrawPiece):
        return one.target.target == other.target.target
    return one.target == other.target


def _groups(mesh_shape: tuple[int, ...], dim: int) -> list[list[int]]:
    """The ranks that differ in mesh dimension `dim` only, for each such group."""
    ranks = torch.arange(math.prod(mesh_shape)).view(mesh_shape)
    groups: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, mesh_shape[dim]).tolist()
    return groups


def _call(targets: list[Any], arguments: list[tuple[tuple[Any, ...], dict[str, Any]]], groups: list[list[list[int]]]) -> Values:
    target = targets[0]
    if target is _WAIT:
        return [args[0] for args, _ in arguments]
    collective = _COLLECTIVES.get(target)
    if collective is None:
        if is_random(target):
            return _draw(targets, arguments)
        return [target(*args, **kwargs) for args, kwargs in arguments]
    results: Values = [None] * len(arguments)
    dim = mesh_dim_of(str(arguments[0][0][-1]))
    for group in groups[dim]:
        for rank, result in zip(group, collective([arguments[rank][0] for rank in group]), strict=True):
            results[rank] = result
    return results


def _draw(targets: list[Any], arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Values:
    generators = [*_generators(arguments[0])]
    before = [generator.get_state() for generator in generators]
    results: Values = []
    after: list[torch.Tensor] = []
    for target, (args, kwargs) in zip(targets, arguments, strict=True):
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        results.append(target(*args, **kwargs))
        after = after or [generator.get_state() for generator in generators]
    for generator, state in zip(generators, after, strict=True):
        generator.set_state(state)
    return results


def _generators(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[torch.Generator]:
    """The generators that a random op may draw from."""
    args, kwargs = arguments
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    yield from given
    if not given:
        yield torch.default_generator
        if torch.cuda.is_initialized():
            yield torch.cuda.default_generators[torch.cuda.current_device()]


_Arguments = list[tuple[Any, ...]]
"""The positional arguments of a collective on each rank of a group."""


def _all_reduce(group: _Arguments) -> Values:
    tensors = [args[0] for args in group]
    reduced = _REDUCTIONS[group[0][1]](torch.stack(tensors))
    return [reduced.clone() for _ in group]


def _all_reduce_in_place(group: _Arguments) -> Values:
    return [args[0].copy_(reduced) for args, reduced in zip(group, _all_reduce(group), strict=True)]


def _all_gather(group: _Arguments) -> Values:
    gathered = torch.cat([args[0] for args in group])
    return [gathered.clone() for _ in group]


def _reduce_scatter(group: _Arguments) -> Values:
    reduced = _REDUCTIONS[group[0][1]](torch.stack([args[0] for args in group]))
    return [piece.clone() for piece in reduced.chunk(len(group))] if len(reduced) else [reduced.clone() for _ in group]


def _all_to_all(group: _Arguments) -> Values:
    sent = [tensor.split(list(lengths)) for tensor, _, lengths, _ in group]
    return [torch.cat([pieces[rank] for pieces in sent]) for rank in range(len(group))]


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "avg": lambda stacked: stacked.mean(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
}

_COLLECTIVES: dict[Any, Callable[[_Arguments], Values]] = {
    functional.all_reduce.default: _all_reduce,
    functional.all_reduce_.default: _all_reduce_in_place,
    functional.all_gather_into_tensor.default: _all_gather,
    functional.reduce_scatter_tensor.default: _reduce_scatter,
    functional.all_to_all_single.default: _all_to_all,
}

_WAIT = functional.wait_tensor.default
