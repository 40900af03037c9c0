"""`lay_out`: a captured step becomes a graph in which every value has a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow.capture.graph import NOTE, Captured
from monoflow.errors import LayoutError
from monoflow.layout.deduce import deduce
from monoflow.layout.pins import Pins, input_layout, output_layout
from monoflow.placement import Placement
from monoflow.sbp import Layout, LayoutLike, format_layout, layout

PIN = "pin"
"""Key in a placeholder's meta under which a pass writes the layout that it shall have."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LaidOut:
    """A step over the ranks of a placement.

    captured    its graph is functional but for copies into placeholders at its end; nodes carry what layout/values.py lists
    inputs      the layout of each placeholder, None for a number
    outputs     the layout in which each output is handed over, None for a number
    """

    captured: Captured
    placement: Placement
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]

    def layout(self, name: str) -> Layout:
        """How a parameter, buffer, entry of optimizer state or argument lies, by its name. Raises LayoutError for an unknown one."""
        found: Layout = self._placeholder(name).meta[PIN]
        return found

    def pin(self, name: str, sbp: LayoutLike) -> None:
        """Sets how it shall lie. Raises LayoutError, SbpError."""
        node = self._placeholder(name)
        node.meta[PIN] = layout(sbp, self.placement.ndim, node.meta["val"].dim())

    def _placeholder(self, name: str) -> fx.Node:
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        found = [n for i, n in zip(self.captured.inputs, nodes, strict=True) if i.name == name and PIN in n.meta]
        if not found:
            raise LayoutError(f"the step has no tensor {name!r}")
        return found[0]


def lay_out(captured: Captured, placement: Placement, pins: Pins) -> LaidOut:
    """Pins inputs and outputs of a functional graph, and deduces the rest. The graph is changed."""
    for node, wanted in _pinned_inputs(captured, pins, placement.ndim).items():
        node.meta[PIN] = wanted
    return deduced(captured, placement, pins)


def deduced(captured: Captured, placement: Placement, pins: Pins) -> LaidOut:
    """Deduces every layout from what is pinned now. Linear in the graph; may be called again after pins have changed."""
    graph = captured.graph.graph
    placeholders = graph.find_nodes(op="placeholder")
    inputs = {node: node.meta[PIN] for node in placeholders if PIN in node.meta}
    deduce(graph, placement.shape, inputs, _pinned_outputs(captured, inputs, pins, placement.ndim))
    for node in graph.nodes:
        node.meta[NOTE] = _note(node.meta.get("layout"))
    found = tuple(inputs.get(node) for node in placeholders)
    (output,) = graph.find_nodes(op="output")
    captured.graph.recompile()
    return LaidOut(captured, placement, found, tuple(output.meta["needs"]))


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
