"""The "inductor" backend: regions compiled to C++ by PyTorch's Inductor, each distinct region once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensor, inductor_compile, storage_id
from monoflow.capture.graph import written_nodes
from monoflow.compile.backends import Report
from monoflow.compile.bindings import Bindings
from monoflow.compile.functionalize import functionalize
from monoflow.compile.program import Executable, compile_program
from monoflow.compile.regions import Region, compilable, plan_regions, region_key
from monoflow.errors import CompileError


_aten = torch.ops.aten


def compile_inductor(graph: fx.Graph, report: Report) -> Executable:
    """Compiles a simplified graph, which it may change. Raises: CompileError naming the lines of a region that fails."""
    functionalize(graph, compilable)
    plan = plan_regions(graph)
    regions = [part for part in plan.parts if isinstance(part, Region)]
    keys = {id(region): region_key(region) for region in regions}
    distinct = len(set(keys.values()))
    compiled: dict[Hashable, Callable[..., Any]] = {}
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
            compiled[key] = _named(_compile_region(part), f"region_{len(compiled)}")
        _call_region(program, part, compiled[key], values)
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


def _named(function: Callable[[list[Any]], Any], name: str) -> Callable[[list[Any]], Any]:
    def region(values: list[Any]) -> Any:
        return function(values)

    region.__name__ = name
    return region


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
