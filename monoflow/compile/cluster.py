"""Clusters the update phase: the same op on many tensors becomes one multi-tensor op.

Optimizers and clipping run a short chain of ops for each parameter. The chains do not depend on each other, so those of
small tensors are run in lockstep and each step of them becomes one `_foreach` op. On the CPU these ops loop over the
tensors in C++ with the very kernels of the single ops, so results are equal to the bit; what is saved is calling.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow.capture.graph import is_collective, memory_of, phase_of, tensors_of, written_nodes

_aten = torch.ops.aten

SMALL = 1 << 16
"""Elements up to which calling an op costs more than running it. Larger tensors keep their order, so that temporaries are freed early."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """`op(tensor, ..., last)` on many tensors: overloads by what `last` is (one number, numbers, tensors, one tensor, absent)."""

    packet: Any
    scalar: str = ""
    scalars: str = ""
    tensors: str = ""
    tensor: str = ""
    absent: str = ""


_LAST = ("other", "weight", "value", "ord")

_BINARY = {"scalar": "Scalar", "scalars": "ScalarList", "tensors": "List"}
_TERNARY = {"scalar": "Scalar", "scalars": "ScalarList", "absent": "Scalar"}

_RULES: dict[Any, _Rule] = {
    _aten.add_.Tensor: _Rule(_aten._foreach_add_, **_BINARY),
    _aten.sub_.Tensor: _Rule(_aten._foreach_sub_, **_BINARY),
    _aten.mul_.Tensor: _Rule(_aten._foreach_mul_, tensor="Tensor", **_BINARY),
    _aten.div_.Tensor: _Rule(_aten._foreach_div_, tensor="Tensor", **_BINARY),
    _aten.add.Tensor: _Rule(_aten._foreach_add, **_BINARY),
    _aten.mul.Tensor: _Rule(_aten._foreach_mul, tensor="Tensor", **_BINARY),
    _aten.div.Tensor: _Rule(_aten._foreach_div, tensor="Tensor", **_BINARY),
    _aten.lerp_.Scalar: _Rule(_aten._foreach_lerp_, scalar="Scalar"),
    _aten.addcmul_.default: _Rule(_aten._foreach_addcmul_, **_TERNARY),
    _aten.addcdiv_.default: _Rule(_aten._foreach_addcdiv_, **_TERNARY),
    _aten.sqrt.default: _Rule(_aten._foreach_sqrt, absent="default"),
    _aten.sqrt_.default: _Rule(_aten._foreach_sqrt_, absent="default"),
    _aten.neg.default: _Rule(_aten._foreach_neg, absent="default"),
    _aten.linalg_vector_norm.default: _Rule(_aten._foreach_norm, scalar="Scalar", absent="Scalar"),
}
"""Single op -> its multi-tensor form. Both forms run the same kernels in the same order for each tensor."""


def cluster(graph: fx.Graph) -> None:
    """Rewrites the update phase in place."""
    _lockstep(graph)
    for run in list(_runs(graph)):
        _merge(graph, run)


# Order


def _lockstep(graph: fx.Graph) -> None:
    """Reorders each stretch of small update ops so that equal ops stand side by side."""
    stretch: list[fx.Node] = []
    for node in [*graph.nodes]:
        if phase_of(node) == "update" and _is_small(node):
            stretch.append(node)
        elif phase_of(node) != "update" or not _independent(node, stretch):  # a large update op stays where it is, small ones pass it
            _reorder(graph, stretch)
            stretch = []
    _reorder(graph, stretch)


def _is_small(node: fx.Node) -> bool:
    """True for an op that moves. Collectives do not: sizes differ between ranks, and the order of collectives must not."""
    if is_collective(node.target):
        return False
    return all(v.numel() <= SMALL for n in [node, *node.all_input_nodes] for v in tensors_of(n))


def _independent(node: fx.Node, others: list[fx.Node]) -> bool:
    """True when `node` and each of `others` may run in either order."""
    inputs, written = set(node.all_input_nodes), set(memory_of(written_nodes(node)))
    touched = set(memory_of([node, *node.all_input_nodes]))
    for other in others:
        if other in inputs or not written.isdisjoint(memory_of([other, *other.all_input_nodes])):
            return False
        if not touched.isdisjoint(memory_of(written_nodes(other))):
            return False
    return True


def _reorder(graph: fx.Graph, stretch: list[fx.Node]) -> None:
    if len(stretch) < 2:
        return
    anchor = stretch[-1].next
    waiting = _dependencies(stretch)
    dependents: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, needed in waiting.items():
        for other in needed:
            dependents[other].append(node)
    ready: dict[Hashable, list[fx.Node]] = defaultdict(list)

    def release(node: fx.Node) -> None:
        ready[_group_key(node)].append(node)

    for node in stretch:
        if not waiting[node]:
            release(node)
    while ready:
        key = max(ready, key=lambda k: (k is None, len(ready[k])))
        for node in ready.pop(key):
            anchor.prepend(node)
            for other in dependents[node]:
                waiting[other].discard(node)
                if not waiting[other]:
                    release(other)


def _dependencies(stretch: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """For each op those it must follow: producers of its inputs, and earlier ops that touch memory it writes (or wrote memory it reads)."""
    inside = set(stretch)
    writers: dict[int, fx.Node] = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    needed: dict[fx.Node, set[fx.Node]] = {}
    for node in stretch:
        before = {n for n in node.all_input_nodes if n in inside}
        written = set(memory_of(written_nodes(node)))
        for memory in set(memory_of(node.all_input_nodes)):
            if memory in writers:
                before.add(writers[memory])
            if memory in written:
                before.update(readers.pop(memory, []))
                writers[memory] = node
            else:
                readers[memory].append(node)
        before.discard(node)
        needed[node] = before
    return needed


def _group_key(node: fx.Node) -> Hashable:
    """Ops with equal keys may merge; None for ops that run alone (and are cheap: arithmetic on numbers)."""
    if node.target not in _RULES:
        return None
    options = _options(node)
    if options is None:
        return None
    values = list(tensors_of(node))
    return (node.target, len(node.args), options, values[0].dtype, values[0].device, _last_kind(node))


def _options(node: fx.Node) -> tuple[tuple[str, Any], ...] | None:
    """Keyword arguments beside `last`, which a multi-tensor op takes once for all; None if there are more than it has."""
    tensors = _tensor_arguments(node)
    extra = [a for a in node.args[tensors:] if a is not _last(node)]
    options = tuple((k, v) for k, v in node.kwargs.items() if k not in _LAST)
    return None if extra or any(k != "alpha" for k, _ in options) else options


def _tensor_arguments(node: fx.Node) -> int:
    count = sum(isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor) for a in node.args)
    return count - (_last_kind(node) == "tensor")


def _last_kind(node: fx.Node) -> str:
    last = _last(node)
    if isinstance(last, fx.Node):
        return "tensor" if isinstance(last.meta.get("val"), torch.Tensor) else "number"
    return "absent" if last is None else "number"


# Merging


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Stretches of neighbouring update ops with equal keys, none of which needs another."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        joins = bool(run) and phase_of(node) == "update" and _group_key(node) == _group_key(run[0]) and _independent(node, run)
        if joins:
            run.append(node)
            continue
        if len(run) > 1:
            yield run
        run = [node] if phase_of(node) == "update" and _group_key(node) is not None else []
    if len(run) > 1:
        yield run


def _last(node: fx.Node) -> Any:
    """The argument that decides the overload: `other`, `weight`, `value` or `ord`; None when it is left out."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    for position, name in enumerate(names):
        if name in _LAST:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return None


def _merge(graph: fx.Graph, run: list[fx.Node]) -> None:
    rule = _RULES[run[0].target]
    lasts = [_last(node) for node in run]
    overload, last = _overload(rule, lasts)
    if not overload:
        return
    options = dict(_options(run[0]) or ())
    if options and overload != "List":
        return
    args: list[Any] = [[node.args[i] for node in run] for i in range(_tensor_arguments(run[0]))]
    if last is not None:
        args.append(last)
    with graph.inserting_after(run[-1]):
        merged = graph.call_function(getattr(rule.packet, overload), tuple(args), options)
    merged.meta["op"] = run[0].meta["op"]
    in_place = rule.packet._qualified_op_name.endswith("_")
    merged.meta["val"] = None if in_place else [node.meta["val"] for node in run]
    for index, node in reversed(list(enumerate(run))):
        if in_place:
            replacement: Any = node.args[0]
        else:
            with graph.inserting_after(merged):
                replacement = graph.call_function(operator.getitem, (merged, index))
            replacement.meta.update(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _overload(rule: _Rule, lasts: list[Any]) -> tuple[str, Any]:
    """(overload name, its last argument); "" where there is none for such arguments."""
    first = lasts[0]
    if all(value is None for value in lasts):
        return rule.absent, None
    if isinstance(first, fx.Node) and isinstance(first.meta.get("val"), torch.Tensor):
        if all(value is first for value in lasts):
            return (rule.tensor, first) if first.meta["val"].dim() == 0 else ("", None)
        return rule.tensors, lasts
    if all(value is first or (not isinstance(value, fx.Node) and value == first) for value in lasts):
        return rule.scalar, first
    return rule.scalars, lasts
