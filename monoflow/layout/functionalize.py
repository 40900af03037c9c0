"""Makes a captured graph free of writes: every in-place op becomes its functional twin, and what it wrote to is named anew.

Only at the very end of the graph `copy_` puts the last value of each placeholder that the step wrote to back into its memory.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, storage_id
from monoflow.capture.graph import Captured, StepGraph, describe_node, fake_mode_of_graph, is_effect, written_nodes
from monoflow.errors import LayoutError
from monoflow.layout.values import is_item
from monoflow.schema import bind_arguments, functional_twin

_aten = torch.ops.aten


def functionalize(captured: Captured) -> Captured:
    """The same step over a graph that writes only by `copy_` into placeholders, at its end. `captured` stays as it is.

    Node meta "written" names, for an op that wrote over the whole of a value, the node of that value.

    Raises: LayoutError for a write that has no functional form; names the user's line.
    """
    graph = _Functional(captured.graph.graph).run()
    return dataclasses.replace(captured, graph=StepGraph(torch.nn.Module(), graph))


class _Functional:
    def __init__(self, old: fx.Graph) -> None:
        self.old = old
        self.new = fx.Graph()
        self.mode = fake_mode_of_graph(old)
        self.made: dict[fx.Node, fx.Node] = {}
        """Node of the old graph -> the node that has its value now, as far as it is up to date."""
        self.version: dict[fx.Node, int] = {}
        self.base: dict[int, fx.Node] = {}
        """Storage -> the node of the old graph that brought it in."""
        self.family: dict[fx.Node, int] = {}
        self.versions: dict[int, int] = {}
        self.parent: dict[fx.Node, fx.Node] = {}
        """A view -> what it is a view of."""
        self.info: Any = None

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            self.info = node.meta.get("op")
            if node.op == "placeholder":
                self._know(node, self.new.node_copy(node))
            elif node.op == "output":
                outputs = tuple(self._use(n) if isinstance(n, fx.Node) else n for n in node.args[0])
                self._write_back()
                self.new.output(outputs)
            else:
                self._call(node)
        self.new.eliminate_dead_code(is_effect)  # bases put together again for views that nobody takes anew
        return self.new

    def _write_back(self) -> None:
        for family, base in self.base.items():
            if base.op == "placeholder" and self.versions[family]:
                target = next(n for n in self.new.nodes if n.op == "placeholder" and n.name == base.name)
                value = self.made[base]
                node = self.new.call_function(_aten.copy_.default, (target, value))
                node.meta["val"] = target.meta["val"]
                if "op" in value.meta:
                    node.meta["op"] = value.meta["op"]

    # Values

    def _know(self, node: fx.Node, made: fx.Node) -> None:
        """A node of the old graph has got its value; notes whose memory it shares."""
        self.made[node] = made
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            family = storage_id(value)
            if family not in self.base:
                self.base[family] = node
                self.versions[family] = 0
            self.family[node] = family
            self.version[node] = self.versions[family]

    def _use(self, node: fx.Node) -> fx.Node:
        """The node of the new graph with the present value of a node of the old one.

        A view is taken anew when its memory was written to.
        """
        family = self.family.get(node)
        if family is None or self.version[node] == self.versions[family]:
            return self.made[node]
        if node in self.parent:
            parent = self._use(self.parent[node])
            if _is_result_of_write(node):
                made = parent
            elif node.op == "call_function" and not is_item(node):
                made = self._emit(node.target, (parent, *self._map(node.args[1:])), self._map(node.kwargs))
            elif is_item(node):
                source: Any = node.args[0]
                several = self._emit(source.target, (parent, *self._map(source.args[1:])), self._map(source.kwargs))
                made = self._emit(operator.getitem, (several, node.args[1]), {})
            self.made[node] = made
        self.version[node] = self.versions[family]
        return self.made[node]

    def _map(self, value: Any) -> Any:
        return fx.node.map_arg(value, self._use)

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if target is operator.getitem:
            value = fake_args[0][fake_args[1]]
        else:
            with self.mode, torch.no_grad():
                try:
                    value = target(*fake_args, **fake_kwargs)
                except RuntimeError:
                    if target not in (_aten.view.default, _aten._unsafe_view.default):
                        raise
                    target = _aten.reshape.default
                    value = target(*fake_args, **fake_kwargs)
        node = self.new.call_function(target, args, kwargs)
        node.meta["val"] = value
        if self.info is not None:
            node.meta["op"] = self.info
        return node

    # Ops

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target in _COPIES:
            made = self._emit(_COPIES[target], self._map(node.args), self._map(node.kwargs))
            self._know(node, made)
            return
        written = _written_by(node)
        if written:
            self._write(node, written)
            return
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        view_of = self._view_of(node)
        if view_of is not None:
            self.parent[node] = view_of
        changed = any(self.made[n].meta.get("val") is not n.meta.get("val") for n in node.all_input_nodes)
        if (
            isinstance(node.target, OpOverload)
            and isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
            and changed
            and (view_of is not None or _strides_changed(node, self.made))
        ):
            made = self._emit(node.target, args, kwargs)
        else:
            made = self.new.call_function(target, args, kwargs, name=node.name)
            made.meta.update(node.meta)
            if is_item(node):
                made.meta["val"] = made.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
        self._know(node, made)

    def _view_of(self, node: fx.Node) -> fx.Node | None:
        """The argument whose memory the result lies in; for one of several views, that of the op that made them."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        source = node.args[0] if is_item(node) else node
        for argument in source.all_input_nodes:  # type: ignore[union-attr]
            held = argument.meta.get("val")
            if isinstance(held, torch.Tensor) and storage_id(held) == storage_id(value):
                return argument
        return None

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        target: Any = node.target
        if torch.Tag.inplace_view in target.tags:
            self._change_view(node, written[0])
            return
        results = self._functional(node, written)
        own, others = results[: len(results) - len(written)], results[len(results) - len(written) :]
        for argument, made in zip(written, others, strict=True):
            self._overwrite(argument, made)
        value = node.meta.get("val")
        if own:  # an op with results beside what it writes to, which its twin gives first
            first: Any = own[0] if isinstance(value, torch.Tensor) else own[0].args[0]
            self._know(node, first)
        elif isinstance(value, torch.Tensor) and len(written) == 1:
            self._know(node, self._use(written[0]))
            self.parent.setdefault(node, written[0])
        elif isinstance(value, list | tuple) and any(user.op != "output" for user in node.users):
            raise LayoutError(f"{describe_node(node)}: the results of an op that writes into several tensors are used")
        else:
            self.made[node] = self._use(written[0])

    def _functional(self, node: fx.Node, written: list[fx.Node]) -> list[fx.Node]:
        """The new values of the written arguments, computed without a write."""
        target: Any = node.target
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        if target is _aten.copy_.default:
            return [self._copied(args[0], args[1])]
        twin = functional_twin(target)
        if twin is None:
            return self._on_copies(node, written, args, kwargs)
        bound = bind_arguments(target, args, kwargs)
        positional = [bound[a.name] for a in twin._schema.arguments if not a.kwarg_only]
        keywords = {a.name: bound[a.name] for a in twin._schema.arguments if a.kwarg_only and a.name in bound and bound[a.name] is not None}
        made = self._emit(twin, tuple(positional), keywords)
        outputs = self._items(made)
        for value, result in zip(written, outputs[len(outputs) - len(written) :], strict=True):
            if len(outputs) == 1:
                made.meta.setdefault("written", self._use(value))
            if result.meta["val"].shape != value.meta["val"].shape:
                raise LayoutError(f"{describe_node(node)} changes the shape of what it writes to")
        return outputs

    def _items(self, made: fx.Node) -> list[fx.Node]:
        """The tensors of a node's value as nodes, flat."""
        value = made.meta["val"]
        if isinstance(value, torch.Tensor):
            return [made]
        found: list[fx.Node] = []
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor | list | tuple):
                found.extend(self._items(self._emit(operator.getitem, (made, index), {})))
        return found

    def _copied(self, old: fx.Node, source: fx.Node) -> fx.Node:
        before, value = old.meta["val"], source.meta["val"]
        if (before.shape, before.dtype, before.stride()) == (value.shape, value.dtype, value.stride()):
            return source
        made = self._emit(_aten.copy.default, (old, source), {})
        made.meta["written"] = old
        return made

    def _on_copies(self, node: fx.Node, written: list[fx.Node], args: Any, kwargs: Any) -> list[fx.Node]:
        """For an op without a functional twin: it writes into copies that nobody else sees."""
        if len(written) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
            raise LayoutError(f"{describe_node(node)} writes into its arguments, and there is no functional form of it")
        own = self._use(written[0])
        copy = self._emit(_aten.clone.default, (own,), {})
        args, kwargs = fx.node.map_arg((args, kwargs), lambda n: copy if n is own else n)
        made = self._emit(node.target, args, kwargs)
        made.meta["private_write"] = True
        return [made]

    def _overwrite(self, value: fx.Node, made: fx.Node) -> None:
        """`value` of the old graph now is `made`: passed on to what it is a view of, down to the tensor that owns the memory."""
        family = self.family[value]
        node, new = value, made
        while node in self.parent:
            parent = self.parent[node]
            new = self._scattered(node, self._use(parent), new)
            node = parent
        self.versions[family] += 1
        for known, fresh in ((node, new), (value, made)):
            self.made[known] = fresh
            self.version[known] = self.versions[family]

    def _scattered(self, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        """`whole` with `part` in the place that `view` looks at."""
        if view.target in (_aten.detach.default, _aten.alias.default) or _is_result_of_write(view):
            return part
        if is_item(view):
            return self._scattered_item(view, whole, part)
        inverse = _INVERSES.get(view.target)
        if inverse is None:
            raise LayoutError(f"{describe_node(view)} is written through, and there is no inverse of this view")
        target, args, kwargs = inverse(bind_arguments(view.target, view.args, view.kwargs), whole, part)  # type: ignore[arg-type]
        return self._emit(target, args, kwargs)

    def _scattered_item(self, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        source: Any = view.args[0]
        index: Any = view.args[1]
        bound = bind_arguments(source.target, source.args, source.kwargs)
        dim = bound.get("dim", 0)
        if source.target is _aten.unbind.int:
            return self._emit(_aten.select_scatter.default, (whole, part, dim, index), {})
        values = source.meta["val"]
        start = sum(v.shape[dim] for v in values[:index])
        return self._emit(_aten.slice_scatter.default, (whole, part, dim, start, start + values[index].shape[dim]), {})

    def _change_view(self, node: fx.Node, written: fx.Node) -> None:
        """`x.t_()` and the like: the tensor looks at its memory in another way from here on."""
        twin = functional_twin(node.target)
        if twin is None:
            raise LayoutError(f"{describe_node(node)} changes a tensor's view of its memory, and there is no functional form of it")
        made = self._emit(twin, (self._use(written), *self._map(node.args[1:])), self._map(node.kwargs))
        self.made[written] = self.made[node] = made
        family = self.family[written]
        self.family[node], self.version[node] = family, self.versions[family]


_COPIES: dict[Any, Any] = {
    _aten._conj.default: _aten._conj_physical.default,
    _aten._neg_view.default: _aten.neg.default,
    _aten._efficientzerotensor.default: _aten.zeros.default,
}
"""Ops that only mark their result -> ops that compute it: a mark would not survive a collective."""

_Inverse = Callable[[dict[str, Any], fx.Node, fx.Node], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def _reshaped(_: dict[str, Any], whole: fx.Node, part: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return _aten.reshape.default, (part, list(whole.meta["val"].shape)), {}


def _permuted(bound: dict[str, Any], whole: fx.Node, part: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    dims = [d % len(bound["dims"]) for d in bound["dims"]]
    return _aten.permute.default, (part, [dims.index(i) for i in range(len(dims))]), {}


def _by_scatter(target: OpOverload) -> _Inverse:
    """The inverse is `x_scatter(whole, part, *the view's own arguments)`."""
    return lambda bound, whole, part: (target, (whole, part, *list(bound.values())[1:]), {})


_INVERSES: dict[Any, _Inverse] = {
    **dict.fromkeys(
        (
            _aten.view.default,
            _aten._unsafe_view.default,
            _aten.reshape.default,
            _aten.unsqueeze.default,
            _aten.squeeze.default,
            _aten.squeeze.dim,
            _aten.squeeze.dims,
        ),
        _reshaped,
    ),
    _aten.t.default: lambda bound, whole, part: (_aten.t.default, (part,), {}),
    _aten.transpose.int: lambda bound, whole, part: (_aten.transpose.int, (part, bound["dim0"], bound["dim1"]), {}),
    _aten.permute.default: _permuted,
    _aten.slice.Tensor: _by_scatter(_aten.slice_scatter.default),
    _aten.select.int: _by_scatter(_aten.select_scatter.default),
    _aten.diagonal.default: _by_scatter(_aten.diagonal_scatter.default),
    _aten.as_strided.default: _by_scatter(_aten.as_strided_scatter.default),
    _aten.view_as_real.default: lambda bound, whole, part: (_aten.view_as_complex.default, (part,), {}),
    _aten.view_as_complex.default: lambda bound, whole, part: (_aten.view_as_real.default, (part,), {}),
}
"""View -> the op that puts what was written through it back."""


def _written_by(node: fx.Node) -> list[fx.Node]:
    """What an op writes to. native_batch_norm updates its running statistics, though its schema does not say so."""
    if node.target is not _aten.native_batch_norm.default:
        return written_nodes(node)
    bound = bind_arguments(node.target, node.args, node.kwargs)
    statistics = [bound["running_mean"], bound["running_var"]]
    return statistics if bound["training"] and all(isinstance(s, fx.Node) for s in statistics) else []


def _is_result_of_write(node: fx.Node) -> bool:
    return bool(written_nodes(node))


def _strides_changed(node: fx.Node, made: dict[fx.Node, fx.Node]) -> bool:
    for argument in node.all_input_nodes:
        before, now = argument.meta.get("val"), made[argument].meta.get("val")
        if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor) and before.stride() != now.stride():
            return True
    return False
