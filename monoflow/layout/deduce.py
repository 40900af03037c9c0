"""Deduction: from the layouts of the inputs to the layout of every value, in one pass along the graph.

Each op takes, for each mesh dimension on its own, the option of its rule that costs least: the transfers of its arguments, plus what the
result is going to cost. Two facts stand in for a look ahead:

- A partial sum is passed on only where that is surely not more expensive than to reduce it at once: to a result not larger than
  the argument, which nobody else uses. So gradients under a split batch stay P until the update needs them, and a sum of partial
  sums is reduced once.
- A split that no argument has yet costs what it takes to undo it, so that replicated values stay so.

A value that has been converted keeps both layouts for later users: what is paid once is free afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, decompositions
from monoflow.capture.graph import describe_node, phase_of
from monoflow.errors import LayoutWarning, RuleError, SbpError
from monoflow.layout.call import Call
from monoflow.layout.cost import transfer_cost
from monoflow.layout.expand import expand
from monoflow.layout.expansions import EXPANSIONS
from monoflow.layout.options import Group, Option, flat_tensors, groups_of, whole_group
from monoflow.layout.table import find_entry, rule_line
from monoflow.layout.values import is_item, map_layouts, tensor_inputs, whole_layout
from monoflow.layout_hint import is_alone, is_hint
from monoflow.sbp import Layout, Partial, Sbp, Split, broadcast, layout, partial_sum
from monoflow.schema import op_name

LAZY = 0.999
"""Between passing a partial sum on and reducing it at once, at equal cost, it is passed on: it may yet be added to another."""


def deduce(graph: fx.Graph, mesh_shape: tuple[int, ...], inputs: dict[fx.Node, Layout], outputs: list[Layout | None]) -> None:
    """Writes meta["layout"] and meta["needs"] of every node (layout/values.py says what these are).

    Args:
        graph: a functional graph over whole tensors; ops whose rules are too coarse for the layouts that come are replaced by finer ones.
        inputs: the layouts of placeholders; B for those that are not in it.
        outputs: the layout that each output must have, None where any but a partial one will do.
    """
    _Deduction(graph, mesh_shape, outputs).run(inputs)


class _Deduction:
    def __init__(self, graph: fx.Graph, mesh_shape: tuple[int, ...], outputs: list[Layout | None]) -> None:
        self.graph = graph
        self.mesh_shape = mesh_shape
        self.outputs = outputs
        self.whole = whole_layout(len(mesh_shape))
        self.versions: dict[fx.Node, list[Layout]] = {}
        self.warned: set[str] = set()
        self.gone: set[fx.Node] = set()

    def run(self, inputs: dict[fx.Node, Layout]) -> None:
        for node in list(self.graph.nodes):
            if node in self.gone:
                continue
            if node.op == "placeholder":
                self._give(node, inputs.get(node, self.whole))
            elif node.op == "output":
                node.meta["needs"] = tuple(self._need(n, want) for n, want in zip(node.args[0], self.outputs, strict=True))
            else:
                pending = [node]
                while pending:
                    node = pending.pop(0)
                    if node not in self.gone:
                        pending[:0] = self._call(node)

    def _need(self, node: fx.Node, wanted: Layout | None) -> Layout | None:
        """The layout in which an output is handed over; None for what is no tensor."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if wanted is None:
            wanted = tuple(broadcast if isinstance(s, Partial) else s for s in self.versions[node][0])
        self._convert(node, wanted)
        return wanted

    # One op

    def _call(self, node: fx.Node) -> list[fx.Node]:
        """Lays out one op. Returns the ops that have taken its place, if any, which are to be laid out instead."""
        if is_item(node):
            self._item(node)
        elif not isinstance(node.target, OpOverload) or not _has_tensors(node):
            self._settle(node, [self.whole] * len(tensor_inputs(node)), None)
        elif is_hint(node.target):
            self._hint(node)
        elif node.target is torch.ops.aten.copy_.default:
            kept = self.versions[node.args[0]][0]  # type: ignore[index]
            self._settle(node, [kept, kept], [kept])
        else:
            return self._op(node, node.target)
        return []

    def _item(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        found = source.meta["layout"][node.args[1]]
        node.meta["layout"], node.meta["needs"] = found, ()
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.versions[node] = [found]

    def _hint(self, node: fx.Node) -> None:
        try:
            wanted = layout(node.args[1], len(self.mesh_shape), node.meta["val"].dim())  # type: ignore[arg-type]
        except SbpError as exc:
            raise SbpError(f"{describe_node(node)}: {exc}") from None
        if is_alone(node):
            node.meta["needs"] = (wanted,)
            self._give(node, wanted)
        else:
            self._settle(node, [wanted], [wanted])

    def _op(self, node: fx.Node, target: OpOverload) -> list[fx.Node]:
        call = Call.of(node)
        inputs = tensor_inputs(node)
        results = list(flat_tensors(node.meta["val"]))
        line = rule_line(call)
        if line is None:
            decomposed = self._decompose(node, target)
            if decomposed:
                return decomposed
            self._warn(node, target, "no layout rule", "mf.register_rule gives it one")
            groups: tuple[Group, ...] = (whole_group(len(inputs), len(results)),)
        else:
            groups = groups_of(call, line)
            finer = EXPANSIONS.get(_key(target)) or EXPANSIONS.get(op_name(target))
            if finer is not None and any(self._cuts_whole(group, inputs) for group in groups):
                try:
                    return self._replace(node, finer)
                except RuleError as exc:
                    self._warn(node, target, f"no finer layout ({exc})", "give its arguments another layout, or its numbers as tensors")
        needs: list[Layout] = [self.whole] * len(inputs)
        layouts: list[Layout] = [self.whole] * len(results)
        cuts: list[tuple[str, int]] = [("", 0)] * len(self.mesh_shape)
        for group in groups:
            chosen = self._choose(group, inputs, results, phase_of(node) == "update")
            cuts = [(option.factor, option.size) if option.offset else cut for option, cut in zip(chosen, cuts, strict=True)]
            for at, place in enumerate(group.inputs):
                needs[place] = tuple(option.inputs[at] for option in chosen)
            for at, place in enumerate(group.outputs):
                layouts[place] = tuple(option.outputs[at] for option in chosen)
        node.meta["rule"] = line
        node.meta["offsets"] = tuple(cuts) if any(factor for factor, _ in cuts) else ()
        self._settle(node, needs, layouts)
        return []

    def _decompose(self, node: fx.Node, target: OpOverload) -> list[fx.Node]:
        """The ops of PyTorch's own decomposition, if there is one that stays free of writes."""
        table = decompositions()
        try:
            return self._replace(node, table[target]) if target in table else []
        except RuleError:  # it writes, or needs an op without a rule
            return []

    def _replace(self, node: fx.Node, function: Callable[..., Any]) -> list[fx.Node]:
        """The ops of a function in the place of one op. Raises RuleError, with the graph as it was."""
        items = [user for user in node.users if is_item(user)]
        replacing = expand(self.graph, node, function, _has_rule)
        self.gone.update([node, *items])
        return replacing

    def _warn(self, node: fx.Node, target: OpOverload, why: str, fix: str) -> None:
        if str(target) not in self.warned:
            self.warned.add(str(target))
            warnings.warn(
                f"{why} for {describe_node(node)}: it runs on whole tensors on every rank. Fix: {fix}.", LayoutWarning, stacklevel=2
            )

    def _cuts_whole(self, group: Group, inputs: list[fx.Node]) -> bool:
        """True when an argument comes cut in a dimension that the rule does not cut."""
        for place, dim in group.kept_whole:
            versions = self.versions[inputs[place]]
            if any(all(v[i] == Split(dim) for v in versions) for i in range(len(self.mesh_shape))):
                return True
        return False

    # Choosing

    def _choose(self, group: Group, inputs: list[fx.Node], results: list[Any], is_update: bool) -> list[Option]:
        """An option for each mesh dimension."""
        nodes = [inputs[place] for place in group.inputs]
        values = [results[place] for place in group.outputs]
        chosen: list[Option] = []
        for i, parts in enumerate(self.mesh_shape):
            best, least = group.options[0], math.inf
            for option in group.options:
                if not option.fits(parts * self._parts_before(option, chosen)) or (is_update and _rounds(option, values)):
                    continue
                cost = self._cost(option, i, nodes, values)
                if cost < least:
                    best, least = option, cost
            chosen.append(best)
        return chosen

    def _parts_before(self, option: Option, chosen: list[Option]) -> int:
        return math.prod(self.mesh_shape[j] for j, other in enumerate(chosen) if other.factor == option.factor)

    def _cost(self, option: Option, i: int, nodes: list[fx.Node], values: list[Any]) -> float:
        cost = sum((self._transfer(n, s, i) for n, s in zip(nodes, option.inputs, strict=True)), 0.0)
        if option.kind == "partial":
            if any(s == partial_sum and not self._only_partial(n, i) for n, s in zip(nodes, option.inputs, strict=True)):
                return math.inf
            return cost + LAZY * self._undo(values, option.outputs, i)
        if option.kind == "cut":
            split = [(n, s) for n, s in zip(nodes, option.inputs, strict=True) if isinstance(s, Split)]
            if not any(v[i] == s for n, s in split for v in self.versions[n]) and not self._is_cut(nodes, i):
                cost += self._undo(values, option.outputs, i)
        return cost

    def _is_cut(self, nodes: list[fx.Node], i: int) -> bool:
        """True when an argument is split over this mesh dimension and would have to be gathered for the op to run whole."""
        return any(all(isinstance(v[i], Split) for v in self.versions[n]) for n in nodes)

    def _only_partial(self, node: fx.Node, i: int) -> bool:
        """True when a value is a partial sum, is not there otherwise, and has a single user."""
        return len(node.users) == 1 and all(v[i] == partial_sum for v in self.versions[node])

    def _undo(self, values: list[Any], layouts: tuple[Sbp, ...], i: int) -> float:
        """What it takes to make results whole again."""
        return sum((self._one_dim(s, broadcast, v, i, 1) for v, s in zip(values, layouts, strict=True)), 0.0)

    def _transfer(self, node: fx.Node, wanted: Sbp, i: int) -> float:
        """The cheapest way from a layout that the value has, along one mesh dimension."""
        value = node.meta["val"]
        return min(self._one_dim(v[i], wanted, value, i, self._other_splits(v, i)) for v in self.versions[node])

    def _one_dim(self, source: Sbp, wanted: Sbp, value: torch.Tensor, i: int, splits: int) -> float:
        if source == wanted:
            return 0.0
        return transfer_cost((source,), (wanted,), tuple(value.shape), value.element_size(), (self.mesh_shape[i],)) / splits

    def _other_splits(self, found: Layout, i: int) -> int:
        return math.prod(n for j, (s, n) in enumerate(zip(found, self.mesh_shape, strict=True)) if j != i and isinstance(s, Split))

    # Writing down

    def _settle(self, node: fx.Node, needs: list[Layout], layouts: list[Layout] | None) -> None:
        for source, need in zip(tensor_inputs(node), needs, strict=True):
            self._convert(source, need)
        node.meta["needs"] = tuple(needs)
        value = node.meta.get("val")
        flat: Iterator[Layout] = iter(layouts) if layouts is not None else iter(lambda: self.whole, None)
        self._give(node, map_layouts(value, flat))

    def _give(self, node: fx.Node, found: Any) -> None:
        node.meta["layout"] = found
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.versions[node] = [found]

    def _convert(self, node: fx.Node, wanted: Layout) -> None:
        if wanted not in self.versions[node]:
            self.versions[node].append(wanted)


def _rounds(option: Option, values: list[Any]) -> bool:
    """True where an op's sum would be taken apart into terms of half precision.

    In an update that rounding, which one device does not have, would stay in the parameters (Muon's iterations are in bfloat16).
    """
    return option.kind == "cut" and any(
        isinstance(s, Partial) and v.dtype in (torch.bfloat16, torch.float16) for s, v in zip(option.outputs, values, strict=True)
    )


def _has_rule(target: OpOverload) -> bool:
    return find_entry(target) is not None


def _has_tensors(node: fx.Node) -> bool:
    return any(True for _ in flat_tensors(node.meta.get("val")))


def _key(target: OpOverload) -> str:
    return f"{op_name(target)}.{target._overloadname}"
