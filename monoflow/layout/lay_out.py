"""`lay_out`: a captured step becomes a graph in which every value has a layout."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from monoflow.capture.graph import NOTE, Captured, Input
from monoflow.errors import LayoutError
from monoflow.layout.deduce import deduce
from monoflow.layout.pins import Pins, input_layout, output_layout
from monoflow.layout_hint import insert_hint
from monoflow.placement import Placement
from monoflow.sbp import Layout, LayoutLike, format_layout, layout

PIN = "pin"
"""Key in a placeholder's meta under which a pass writes the layout that it shall have; in the output's meta, the same by position."""

StateKind: TypeAlias = Literal["parameter", "buffer", "optimizer", "gradient", "argument"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How communication is ordered.

    prefetch      how many buckets of gathered inputs travel ahead of the one that is used
    bucket_bytes  size from which on a bucket of gathered inputs, or of what is reduced into pieces, is closed; None: by the cost model
    """

    prefetch: int = 1
    bucket_bytes: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class LaidOut:
    """A step over the ranks of a placement.

    captured    its graph is functional but for copies into placeholders at its end; nodes carry what layout/values.py lists
    inputs      the layout of each placeholder, None for a number
    outputs     the layout in which each output is handed over, None for a number
    schedule    how communication is ordered
    """

    captured: Captured
    placement: Placement
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    schedule: Schedule = Schedule()

    @property
    def graph(self) -> fx.Graph:
        """The graph over whole tensors."""
        return self.captured.graph.graph

    def names(self, kind: StateKind) -> list[str]:
        """The tensors of a kind that the step reads or writes, by name. The gradient that it leaves in `fc.weight` is `fc.weight.grad`."""
        return [name for name, place in self._places.items() if place.kind == kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor of the state or an argument. Raises LayoutError for an unknown one."""
        return self._place(name).shape

    def layout(self, name: str) -> Layout:
        """How a tensor of the state or an argument lies, by its name. Raises LayoutError for an unknown one."""
        place = self._place(name)
        found = self.outputs[place.position] if place.placeholder is None else place.placeholder.meta[PIN]
        assert found is not None
        return found

    def pin(self, name: str, sbp: LayoutLike) -> None:
        """Sets how it shall lie, on entry and where the step stores it. Raises LayoutError, SbpError."""
        place = self._place(name)
        wanted = layout(sbp, self.placement.ndim, len(place.shape))
        if place.placeholder is not None:
            place.placeholder.meta[PIN] = wanted
        if place.position >= 0:
            self._output.meta.setdefault(PIN, {})[place.position] = wanted

    def convert(self, node: fx.Node, sbp: LayoutLike, users: Iterable[fx.Node], alone: bool = False) -> fx.Node:
        """From here on these users of a value take it in another layout. Returns the node that stands for it there.

        With `alone` the converted value is theirs only: it is made for them, and freed after them. Raises SbpError.
        """
        return insert_hint(node, layout(sbp, self.placement.ndim, node.meta["val"].dim()), users, alone)

    def placeholder(self, name: str) -> fx.Node | None:
        """The graph's input of that name, None for what the step makes. Raises LayoutError for an unknown one."""
        return self._place(name).placeholder

    @property
    def _output(self) -> fx.Node:
        (output,) = self.graph.find_nodes(op="output")
        return output

    @functools.cached_property
    def _places(self) -> dict[str, _Place]:
        found: dict[str, _Place] = {}
        for source, node in zip(self.captured.inputs, self.graph.find_nodes(op="placeholder"), strict=True):
            if PIN in node.meta:
                found[_input_name(source)] = _Place(source.kind, tuple(node.meta["val"].shape), node)
        values: Any = self._output.args[0]
        for position, write in enumerate(self.captured.writes, self.captured.returned_count):
            if self.outputs[position] is not None:
                entered = found[write.name].placeholder if write.name in found else None
                found[write.name] = _Place(write.kind, tuple(values[position].meta["val"].shape), entered, position)
        return found

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            close = difflib.get_close_matches(name, self._places, 1)
            raise LayoutError(f"the step has no tensor {name!r}" + (f": do you mean {close[0]!r}?" if close else ""))
        return self._places[name]


@dataclass(frozen=True, slots=True)
class _Place:
    """A named tensor in the graph: its placeholder, if it enters, and its position among the outputs, if it is stored anew."""

    kind: str
    shape: tuple[int, ...]
    placeholder: fx.Node | None
    position: int = -1


def _input_name(source: Input) -> str:
    """The gradient of a parameter has the name that it is stored under."""
    return f"{source.parameter}.grad" if source.kind == "gradient" and source.parameter is not None else source.name


def lay_out(captured: Captured, placement: Placement, pins: Pins) -> LaidOut:
    """Pins inputs and outputs of a functional graph, and deduces the rest. The graph is changed."""
    for node, wanted in _pinned_inputs(captured, pins, placement.ndim).items():
        node.meta[PIN] = wanted
    return deduced(captured, placement, pins)


def deduced(captured: Captured, placement: Placement, pins: Pins, schedule: Schedule = Schedule()) -> LaidOut:
    """Deduces every layout from what is pinned now. Linear in the graph; may be called again after pins have changed."""
    graph = captured.graph.graph
    placeholders = graph.find_nodes(op="placeholder")
    inputs = {node: node.meta[PIN] for node in placeholders if PIN in node.meta}
    (output,) = graph.find_nodes(op="output")
    outputs = _pinned_outputs(captured, inputs, pins, placement.ndim)
    outputs = [output.meta.get(PIN, {}).get(position, found) for position, found in enumerate(outputs)]
    deduce(graph, placement.shape, inputs, outputs)
    for node in graph.nodes:
        node.meta[NOTE] = _note(node.meta.get("layout"))
    found = tuple(inputs.get(node) for node in placeholders)
    captured.graph.recompile()
    return LaidOut(captured, placement, found, tuple(output.meta["needs"]), schedule)


def _note(found: Any) -> str:
    """A layout, or several, as text."""
    if isinstance(found, list):
        return "(" + ", ".join(map(_note, found)) + ")"
    return "" if found is None else format_layout(found)


def _shapes(captured: Captured) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, by name."""
    nodes = captured.graph.graph.find_nodes(op="placeholder")
    return {i.name: tuple(n.meta["val"].shape) for i, n in zip(captured.inputs, nodes, strict=True) if i.kind == "parameter"}


def _pinned_inputs(captured: Captured, pins: Pins, mesh_dims: int) -> dict[fx.Node, Layout]:
    shapes = _shapes(captured)
    found: dict[fx.Node, Layout] = {}
    for source, node in zip(captured.inputs, captured.graph.graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found[node] = input_layout(source, tuple(value.shape), pins, shapes, mesh_dims)
    return found


def _pinned_outputs(captured: Captured, inputs: Mapping[fx.Node, Layout], pins: Pins, mesh_dims: int) -> list[Layout | None]:
    """Returned values may lie as they come; written ones lie like what they replace."""
    graph = captured.graph.graph
    by_name = {i.name: inputs.get(n) for i, n in zip(captured.inputs, graph.find_nodes(op="placeholder"), strict=True)}
    shapes = _shapes(captured)
    (output,) = graph.find_nodes(op="output")
    found: list[Layout | None] = [None] * captured.returned_count
    for write, node in zip(captured.writes, output.args[0][captured.returned_count :], strict=True):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            found.append(None)
            continue
        name = write.name.removesuffix(".grad") if write.kind == "gradient" else write.name
        stored = by_name.get(name)
        found.append(stored if stored is not None else output_layout(write, tuple(value.shape), pins, shapes, mesh_dims))
    return found
