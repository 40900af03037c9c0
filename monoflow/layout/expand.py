"""Puts the ops that a Python function runs in the place of one op of the graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, TorchDispatchMode, fake_mode_of
from monoflow.errors import RuleError
from monoflow.layout.options import flat_tensors


def expand(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], known: Callable[[OpOverload], bool]) -> list[fx.Node]:
    """Replaces `node` by the ops of `function(*args, **kwargs)`; returns the new nodes in order. They inherit its OpInfo.

    Raises: RuleError, with the graph as it was, where the function writes into a tensor or runs an op that is not `known`, or where numbers
        of the node are values of the graph (the function would see those of one call only).
    """
    if any(not isinstance(n.meta.get("val"), torch.Tensor | list | tuple) for n in node.all_input_nodes):
        raise RuleError(f"{node.target} takes numbers of the graph and cannot be expanded")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = fake_mode_of(list(flat_tensors([*args, *kwargs.values(), node.meta.get("val")])))
    tracer = _Tracer(graph, node, known)
    for source in node.all_input_nodes:
        tracer.know(source.meta["val"], source)
    try:
        with graph.inserting_before(node), mode or contextlib.nullcontext():
            result = _run(tracer, function, args, kwargs)
        tracer.replace(result)
    except Exception as exc:
        for made in reversed(tracer.nodes):
            graph.erase_node(made)
        raise RuleError(f"{node.target} cannot be expanded: {exc}") from exc
    return tracer.nodes


def _run(tracer: _Tracer, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), tracer:
        return function(*args, **kwargs)


class _Tracer(TorchDispatchMode):
    """Writes each op as a node before the one that is replaced."""

    def __init__(self, graph: fx.Graph, replaced: fx.Node, known_op: Callable[[OpOverload], bool]) -> None:
        super().__init__()
        self.known_op = known_op
        self.graph = graph
        self.replaced = replaced
        self.nodes: list[fx.Node] = []
        self.known: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def know(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            self.known[id(value)] = node
            self.alive.append(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # attributes of fake tensors: their device
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise RuleError(f"it writes into a tensor ({func})")
        if not self.known_op(func):
            raise RuleError(f"{func} has no rule")
        result = func(*args, **kwargs)
        node_args, node_kwargs = self._nodes(list(args)), {k: self._nodes(v) for k, v in kwargs.items()}
        node = self._add(func, tuple(node_args), node_kwargs, result)
        self._results(node, result)
        return result

    def _results(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.know(result, node)
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor | list | tuple):
                    self._results(self._add(operator.getitem, (node, index), {}, item), item)

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if "op" in self.replaced.meta:
            node.meta["op"] = self.replaced.meta["op"]
        self.nodes.append(node)
        return node

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = self.known.get(id(value))
            if node is None:
                raise RuleError("it uses a tensor from outside")
            return node
        if isinstance(value, list):
            return [self._nodes(v) for v in value]
        if isinstance(value, tuple):
            return tuple(self._nodes(v) for v in value)
        return value

    def replace(self, result: Any) -> None:
        """Users of the replaced node now use the new ones."""
        node = self.replaced
        if isinstance(result, torch.Tensor):
            node.replace_all_uses_with(self._nodes(result))
        else:
            items = [(user, self._item(user, result)) for user in node.users]
            if any(taken is None for _, taken in items):
                raise RuleError("its results are used as a whole")
            for user, taken in items:
                user.replace_all_uses_with(taken)  # type: ignore[arg-type]
                self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _item(self, user: fx.Node, result: Any) -> fx.Node | None:
        index = user.args[1] if len(user.args) == 2 else None
        value = result[index] if isinstance(index, int) else None
        return self._nodes(value) if isinstance(value, torch.Tensor) else None
