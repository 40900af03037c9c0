"""Checks layout rules by execution: every way that the rule of an op allows, on pieces, against the op on whole tensors.

Where execution.py checks what deduction chooses for a function, this takes each op that the function runs by itself, with every option
of its rule: also those that deduction has no reason to choose.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import written_nodes
from monoflow.cutting import assemble, coordinates, cut
from monoflow.layout.call import Call
from monoflow.layout.functionalize import functionalize
from monoflow.layout.options import Group, Option, flat_tensors, groups_of
from monoflow.layout.table import rule_line
from monoflow.layout.values import map_layouts, tensor_inputs, whole_layout
from monoflow.lower.lower import lower
from monoflow.run.simulated import run_lockstep
from monoflow.sbp import Layout, Partial
from monoflow.schema import bind_arguments, is_random, positional_and_keywords
from monoflow.testing.execution import Case, difference

MESHES: tuple[int, ...] = (2, 3)


@dataclass(frozen=True, slots=True)
class Fault:
    """An option of a rule under which an op on pieces is not the op on the whole."""

    op: str
    rule: str
    option: Option
    ranks: int
    error: str

    def __str__(self) -> str:
        ways = f"{', '.join(map(str, self.option.inputs))} -> {', '.join(map(str, self.option.outputs))}"
        return f"{self.op} under {self.rule!r}, {ways} on {self.ranks} ranks: {self.error}"


def faults(case: Case, seen: set[Any]) -> Iterator[Fault]:
    """What is wrong with the rules of the ops of a case. `seen` keeps calls from being checked twice."""
    for node, values, line in calls_of(case):
        key = (str(node.target), str([(v.shape, v.dtype, v.stride()) for v in flat_tensors(values)]), str(node.args), str(node.kwargs))
        if key in seen:
            continue
        seen.add(key)
        yield from check_call(node, values, line)


def calls_of(case: Case) -> Iterator[tuple[fx.Node, list[Any], str]]:
    """The ops of a case whose results can be compared and that have a rule: each with the values of its tensor arguments, and the rule."""
    graph = functionalize(case.captured).graph.graph
    held: dict[fx.Node, Any] = {}
    sources = iter(case.captured.inputs)
    torch.manual_seed(case.seed)
    for node in graph.nodes:
        if node.op == "placeholder":
            source = next(sources)
            held[node] = source.value if source.kind == "constant" else case.arguments[source.index].detach().clone()
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
            held[node] = node.target(*args, **kwargs)
            line = rule_line(Call.of(node)) if _is_comparable(node) else None
            if line is not None:
                yield node, [held[n] for n in tensor_inputs(node)], line


def _is_comparable(node: fx.Node) -> bool:
    """True for an op without writes whose results are tensors that depend on its arguments alone."""
    if not isinstance(node.target, OpOverload) or written_nodes(node) or is_random(node.target) or "empty" in str(node.target):
        return False
    return any(True for _ in flat_tensors(node.meta.get("val")))


def check_call(node: fx.Node, values: list[torch.Tensor], line: str) -> Iterator[Fault]:
    """What is wrong with a rule for a call: every option of it, on 2 and on 3 ranks. Raises RuleError where the line does not fit."""
    groups = groups_of(Call.of(node), line)
    expected = list(flat_tensors(_on_whole(node, values)))
    for group in groups[:2]:  # of a list, the first index stands for all
        for option in group.options:
            for ranks in MESHES:
                if option.kind != "whole" and option.fits(ranks) and _adds_numbers(option, [values[i] for i in group.inputs]):
                    error = _try(node, values, expected, group, option, ranks)
                    if error:
                        yield Fault(str(node.target), line, option, ranks, error)


def _on_whole(node: fx.Node, values: list[torch.Tensor]) -> Any:
    target: Any = node.target
    positional, keywords = _arguments(node, iter(values))
    return target(*positional, **keywords)


def _arguments(node: fx.Node, waiting: Iterator[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call, with those that stand for tensors replaced by what is waiting, in order."""
    target: Any = node.target
    bound = {n: _filled(v, waiting) for n, v in bind_arguments(target, node.args, node.kwargs).items()}
    return positional_and_keywords(target, bound)


def _filled(value: Any, waiting: Iterator[Any]) -> Any:
    """An argument with every node that stands for a tensor replaced by the next one waiting."""
    if isinstance(value, fx.Node):
        return next(waiting) if isinstance(value.meta.get("val"), torch.Tensor) else value.meta["val"]
    if isinstance(value, list | tuple):
        return type(value)(_filled(v, waiting) for v in value)
    return value


def _try(node: fx.Node, values: list[torch.Tensor], expected: list[torch.Tensor], group: Group, option: Option, ranks: int) -> str:
    """What is wrong with one option, empty where nothing is."""
    inputs: list[Layout] = [whole_layout(1)] * len(values)
    outputs: list[Layout] = [whole_layout(1)] * len(expected)
    for at, place in enumerate(group.inputs):
        inputs[place] = (option.inputs[at],)
    for at, place in enumerate(group.outputs):
        outputs[place] = (option.outputs[at],)
    try:
        graph = _one_op(node, inputs, outputs, option)
        given = [_pieces(v, found, ranks) for v, found in zip(values, inputs, strict=True)]
        terms = [p for pieces, found in zip(given, inputs, strict=True) if isinstance(found[0], Partial) for p in pieces]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graphs = [lower(graph, (ranks,), at) for at in coordinates((ranks,))]
            results = run_lockstep(graphs, [[pieces[rank] for pieces in given] for rank in range(ranks)], (ranks,))
        for index, (wanted, found) in enumerate(zip(expected, outputs, strict=True)):
            held = [r[index] for r in results]
            added = 10 * max((_largest(p) for p in [*held, *terms]), default=0.0) if isinstance(found[0], Partial) else 0.0
            coarsest = max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point() or v.is_complex()), default=0.0)
            error = difference(assemble(held, found, (ranks,)), wanted, max(2e-4, 4 * coarsest), added)
            if error:
                return f"result {index}: {error}"
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _one_op(node: fx.Node, inputs: Sequence[Layout], outputs: Sequence[Layout], option: Option) -> fx.Graph:
    """A laid-out graph of the op alone."""
    graph = fx.Graph()
    placeholders = []
    for source, found in zip(tensor_inputs(node), inputs, strict=True):
        made = graph.placeholder(source.name)
        made.meta.update(val=source.meta["val"], layout=found)
        placeholders.append(made)
    positional, keywords = _arguments(node, iter(placeholders))
    call = graph.call_function(node.target, tuple(positional), keywords)  # type: ignore[arg-type]
    value = node.meta["val"]
    offsets = ((option.factor, option.size),) if option.offset else ()
    call.meta.update(val=value, needs=tuple(inputs), layout=map_layouts(value, iter(outputs)), offsets=offsets)
    results = list(_results(graph, call, value, call.meta["layout"]))
    graph.output(tuple(results)).meta["needs"] = tuple(outputs)
    return graph


def _results(graph: fx.Graph, node: fx.Node, value: Any, layout: Any) -> Iterator[fx.Node]:
    """Nodes for the tensors of a node's value, flat."""
    if isinstance(value, torch.Tensor):
        yield node
    elif isinstance(value, list | tuple):
        for index, (item, found) in enumerate(zip(value, layout, strict=True)):
            if isinstance(item, torch.Tensor | list | tuple):
                made = graph.call_function(operator.getitem, (node, index))
                made.meta.update(val=item, layout=found, needs=())
                yield from _results(graph, made, item, found)


def _pieces(value: torch.Tensor, found: Layout, ranks: int) -> list[torch.Tensor]:
    """Pieces of a value; terms of a sum are drawn, so that what is not linear cannot hide behind zeros."""
    if found != (Partial(),):
        return [cut(value, found, (ranks,), at) for at in coordinates((ranks,))]
    generator = torch.Generator().manual_seed(0)
    scale = min(max(_largest(value), 1e-3), 1e3)  # not what uninitialized memory holds
    drawn = [(torch.randn(value.shape, generator=generator) * scale).to(value.dtype) for _ in range(ranks - 1)]
    return [*drawn, value - sum(drawn, torch.zeros_like(value))]


def _adds_numbers(option: Option, values: list[torch.Tensor]) -> bool:
    """False for sums of truth values, of float8 and of unsigned numbers: drawn terms of these do not add up."""
    added = [v.dtype for s, v in zip(option.inputs, values, strict=True) if isinstance(s, Partial)]
    return all(d.itemsize > 1 and d not in (torch.uint16, torch.uint32, torch.uint64) for d in added)


def _largest(value: torch.Tensor) -> float:
    """The largest finite element."""
    value = value.float() if value.element_size() == 1 else value
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0
