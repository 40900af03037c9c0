"""From a laid-out graph over whole tensors to the graph that one rank runs over its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import NOTE, fake_mode_of_graph
from monoflow.cutting import narrowed
from monoflow.layout.call import Call
from monoflow.layout.cost import transfer_cost
from monoflow.layout.options import flat_tensors
from monoflow.layout.values import is_item, layout_of
from monoflow.layout_hint import is_alone, is_hint
from monoflow.lower.boxing import convert
from monoflow.lower.draws import draw, draw_piece
from monoflow.lower.emit import Emitter
from monoflow.lower.memory import SEEN_AS
from monoflow.lower.pieces import PIECES
from monoflow.lower.sizes import SIZES
from monoflow.rng import Random
from monoflow.sbp import Layout, Split, piece_bounds, piece_number, piece_of
from monoflow.schema import bind_arguments, is_random, op_name, positional_and_keywords, tensor_arguments

_aten = torch.ops.aten


def lower(graph: fx.Graph, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], random: Random = "exact") -> fx.Graph:
    """The local graph of the rank at `coordinate` of the mesh. Its placeholders and outputs are those of `graph`, in order.

    All ranks get the same ops in the same order; sizes and offsets differ. Collectives name their group by mesh dimension ("mesh0").
    Cut random values are those of one device ("exact"), or drawn piece by piece ("fast").
    """
    return _Lowering(graph, mesh_shape, coordinate, random).run()


class _Lowering:
    def __init__(self, graph: fx.Graph, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], random: Random) -> None:
        self.random = random
        self.graph = graph
        self.mesh_shape = mesh_shape
        self.coordinate = coordinate
        self.mode = fake_mode_of_graph(graph)
        self.emit = Emitter(fx.Graph(), self.mode)
        self.local: dict[fx.Node, Any] = {}
        self.versions: dict[fx.Node, dict[Layout, fx.Node]] = {}

    def run(self) -> fx.Graph:
        for node in self.graph.nodes:
            self.emit.info = node.meta.get("op")
            if node.op == "placeholder":
                self._set(node, self._placeholder(node))
            elif node.op == "output":
                outputs = [self._output(n, need) for n, need in zip(node.args[0], node.meta["needs"], strict=True)]
                self.emit.graph.output(tuple(outputs))
            else:
                self._set(node, self._call(node))
        return self.emit.graph

    def _output(self, node: fx.Node, need: Layout | None) -> fx.Node:
        self.emit.info = node.meta.get("op")
        return self.local[node] if need is None else self._as(node, need)

    def _set(self, node: fx.Node, local: fx.Node) -> None:
        self.local[node] = local
        if node.meta.get(NOTE):
            local.meta[NOTE] = node.meta[NOTE]
        if "written" in node.meta and local.op == "call_function":
            local.meta["written"] = True
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.versions[node] = {layout_of(node): local}

    def _placeholder(self, node: fx.Node) -> fx.Node:
        local = self.emit.graph.placeholder(node.name)
        value = node.meta.get("val")
        local.meta["val"] = self._piece(value, layout_of(node)) if isinstance(value, torch.Tensor) else value
        return local

    def _piece(self, value: torch.Tensor, found: Layout) -> torch.Tensor:
        """A fake tensor of this rank's piece, its dimensions in memory in the order of the whole's."""
        offsets, sizes = piece_of(value.shape, found, self.mesh_shape, self.coordinate)
        with self.mode:
            piece = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            if sizes == list(value.shape):
                return piece
            return torch.empty_like(narrowed(piece, offsets, sizes))

    # Versions of a value

    def _as(self, node: fx.Node, wanted: Layout, keep: bool = True) -> fx.Node:
        """The value in a layout: as it is there already, or converted from the nearest layout in which it is, for later users as well."""
        versions = self.versions[node] if keep else dict(self.versions[node])
        if wanted not in versions:
            value = node.meta["val"]
            nearest = min(versions, key=lambda v: transfer_cost(v, wanted, tuple(value.shape), value.element_size(), self.mesh_shape))
            versions[wanted] = convert(self.emit, versions[nearest], nearest, wanted, tuple(value.shape), self.mesh_shape, self.coordinate)
        return versions[wanted]

    # One op

    def _call(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        if is_item(node):
            source = self.local[node.args[0]]  # type: ignore[index]
            return self.emit.node(target, (source, node.args[1]), {}, source.meta["val"][node.args[1]])
        needs = iter(node.meta["needs"])
        if not isinstance(target, OpOverload):
            args, kwargs = self._arguments((node.args, node.kwargs), needs)
            return self.emit.node(target, tuple(args), dict(kwargs), node.meta.get("val"))
        if is_hint(target):
            return self._as(node.args[0], next(needs), keep=not is_alone(node))  # type: ignore[arg-type]
        names = tensor_arguments(target)
        bound = bind_arguments(target, node.args, node.kwargs)
        tensors = {name: self._arguments(bound[name], needs) for name in names}
        args = {name: tensors[name] if name in tensors else self._arguments(value, needs) for name, value in bound.items()}
        name = op_name(target)
        if node.meta.get("offsets") and name in PIECES:
            return PIECES[name](self.emit, Call.of(node), args, self._cut(node))
        if is_random(target) and self._is_cut(node):
            if self.random == "exact":
                return draw(self.emit, node, args, *self._bounds(node.meta["val"], layout_of(node)))
            args.update(self._sizes(node, name, args))
            return draw_piece(self.emit, node, args, piece_number(layout_of(node), self.mesh_shape, self.coordinate))
        if not any(True for _ in flat_tensors(node.meta.get("val"))):  # a number, such as item() gives
            positional, keywords = positional_and_keywords(target, args)
            return self.emit.node(target, tuple(positional), keywords, node.meta.get("val"))
        args.update(self._sizes(node, name, args))
        if name in SEEN_AS and (rest := SEEN_AS[name](self.emit, node, args)) is not None:
            return rest
        positional, keywords = positional_and_keywords(target, args)
        return self.emit.call(target, *positional, **keywords)

    def _arguments(self, value: Any, needs: Iterator[Layout]) -> Any:
        """Arguments of the local call: every tensor as its piece in the layout that is needed."""
        if isinstance(value, fx.Node):
            return self._as(value, next(needs)) if value in self.versions else self.local[value]
        if isinstance(value, list):
            return [self._arguments(v, needs) for v in value]
        if isinstance(value, tuple):
            return tuple(self._arguments(v, needs) for v in value)
        if isinstance(value, dict):
            return {k: self._arguments(v, needs) for k, v in value.items()}
        return value

    def _sizes(self, node: fx.Node, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments that are shapes, for the piece instead of the whole."""
        found: dict[str, Any] = {}
        for argument, source in SIZES.get(name, {}).items():
            if args.get(argument) is None:
                continue
            if source == "result":
                found[argument] = self._bounds(node.meta["val"], layout_of(node))[1]
            elif isinstance(source, str):
                found[argument] = list(args[source].meta["val"].shape)
            else:
                found[argument] = args[source[0]].meta["val"].shape[source[1]]
        return found

    def _bounds(self, value: torch.Tensor, found: Layout) -> tuple[list[int], list[int]]:
        return piece_of(value.shape, found, self.mesh_shape, self.coordinate)

    def _is_cut(self, node: fx.Node) -> bool:
        layouts = node.meta["layout"]
        return isinstance(node.meta["val"], torch.Tensor) and any(isinstance(s, Split) for s in layouts)

    def _cut(self, node: fx.Node) -> dict[str, tuple[int, int, int]]:
        """Factor -> (where this rank's piece starts, its size, the whole size)."""
        found: dict[str, tuple[int, int, int]] = {}
        for (factor, whole), parts, index in zip(node.meta["offsets"], self.mesh_shape, self.coordinate, strict=True):
            if factor:
                start, size, _ = found.get(factor, (0, whole, whole))
                offset, length = piece_bounds(size, parts, index)
                found[factor] = (start + offset, length, whole)
        return found
