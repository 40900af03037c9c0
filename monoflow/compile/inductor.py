"""The "inductor" backend: regions compiled to C++ by PyTorch's Inductor, each distinct region once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensor, inductor_compile, storage_id
from monoflow.capture.graph import written_nodes
from monoflow.compile.bindings import Bindings
from monoflow.compile.functionalize import functionalize
from monoflow.compile.program import Executable, compile_program
from monoflow.compile.regions import Region, compilable, plan_regions, region_key
from monoflow.errors import CompileError
from monoflow.progress import Report

_aten = torch.ops.aten


def compile_inductor(graph: fx.Graph, report: Report) -> Executable:
    """Compiles a simplified graph, which it may change. Raises: CompileError naming the lines of a region that fails."""
    functionalize(graph, compilable)
    plan = plan_regions(graph)
    regions = [part for part in plan.parts if isinstance(part, Region)]
    keys = {id(region): region_key(region) for region in regions}
    distinct = len(set(keys.values()))
    compiled: dict[Hashable, Callable[..., Any]] = {}
    names: dict[Hashable, str] = {}
    program = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        values[node] = program.node_copy(node)
    for part in plan.parts:
        if isinstance(part, fx.Node):
            values[part] = program.node_copy(part, values.__getitem__)
            continue
        key = keys[id(part)]
        if key not in compiled:
            report("region", len(compiled) + 1, distinct)
            compiled[key] = _compile_region(part)
            names[key] = f"region_{len(names)}"
        _call_region(program, part, _call_site(compiled[key], part, names[key]), values)
    (output,) = graph.find_nodes(op="output")
    program.output(fx.node.map_arg(output.args[0], values.__getitem__))
    return compile_program(program, Bindings())


def _call_region(program: fx.Graph, region: Region, function: Callable[..., Any], values: dict[fx.Node, fx.Node]) -> None:
    call = program.call_function(function, ([values[n] for n in region.inputs],))
    call.meta["op"] = region.nodes[0].meta["op"]
    for index, node in enumerate(region.outputs):
        item = program.call_function(operator.getitem, (call, index))
        item.meta.update(node.meta)
        values[node] = item


def _call_site(function: Callable[[list[Any]], Any], region: Region, name: str) -> Callable[[list[Any]], Any]:
    """One call of a compiled region. Generated code insists on the strides that capture predicted.

    A few kernels return other strides than their fake versions say (`cat` with an empty tensor); the first call finds such
    inputs, and every call copies them.
    """
    wrong: list[tuple[int, torch.Tensor]] | None = None

    def call(values: list[Any]) -> Any:
        nonlocal wrong
        if wrong is None:
            wrong = [(i, n.meta["val"]) for i, n in enumerate(region.inputs) if n.meta["val"].stride() != values[i].stride()]
        for position, expected in wrong:
            value = values[position]
            values[position] = torch.empty_strided(expected.shape, expected.stride(), dtype=value.dtype, device=value.device).copy_(value)
        return function(values)

    call.__name__ = name
    return call


def region_graph(region: Region) -> fx.GraphModule:
    """The region alone, as a function of its inputs that returns its outputs."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in region.inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta["val"] = node.meta["val"]
    written = {storage_id(n.meta["val"]) for node in region.nodes for n in written_nodes(node)}
    for node in region.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.target is _aten.view.default and storage_id(node.meta["val"]) not in written:
            values[node].target = _aten.reshape.default  # decompositions may give the viewed value other strides
    graph.output(tuple(values[n] for n in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _compile_region(region: Region) -> Callable[..., Any]:
    examples: list[FakeTensor] = [node.meta["val"] for node in region.inputs]
    try:
        return inductor_compile(region_graph(region), examples, [node.meta["val"].stride() for node in region.outputs])
    except Exception as exc:
        lines = dict.fromkeys(str(node.meta["op"].user) for node in region.nodes)
        raise CompileError(
            f"Inductor cannot compile a region of {len(region.nodes)} ops, from lines {', '.join(lines)}: {exc}\n"
            'fix: use mf.graph(..., backend="aten"), which needs no compiler'
        ) from exc
