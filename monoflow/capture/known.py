"""Values that are known while a step is captured: hyperparameters, step counts, and what is computed from them alone.

Python may branch on them; each such comparison becomes a guard of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensor, OpOverload, real_tensors
from monoflow.capture.graph import is_effect, written_nodes

Number = int | float


class KnownValues:
    """The values of nodes that are known, by running their ops for real on one-element tensors and numbers.

    ops      nodes whose values were computed here, in order
    tensors  nodes whose known value is a tensor
    guards   (comparison, left, right) -> the answer that Python was given
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.ops: list[fx.Node] = []
        self.tensors: set[fx.Node] = set()
        self.guards: dict[tuple[Any, ...], bool] = {}

    def __contains__(self, node: object) -> bool:
        return node in self.values

    def number(self, node: fx.Node, value: Number) -> None:
        """`node` is an input with this value."""
        self.values[node] = value

    def tensor(self, node: fx.Node, real: torch.Tensor) -> None:
        """`node` is an input or literal with the value of `real`, if that is one number on the CPU."""
        if real.numel() == 1 and real.device.type == "cpu" and not isinstance(real, FakeTensor):
            with real_tensors():
                self.values[node] = real.clone()
            self.tensors.add(node)

    def part(self, node: fx.Node, whole: fx.Node, index: int) -> None:
        """`node` is item number `index` of the result of `whole`."""
        if whole in self.values:
            self.values[node] = self.values[whole][index]
            self.ops.append(node)

    def item(self, node: fx.Node, tensor: fx.Node) -> Number | None:
        """`node` is `.item()` of `tensor`. Its value, if that is known."""
        if tensor not in self.values:
            return None
        with real_tensors():
            value: Number = self.values[tensor].item()
        self.values[node] = value
        self.ops.append(node)
        return value

    def arithmetic(self, node: fx.Node) -> Number:
        """Computes an op on numbers; something to trace with where not all of them are known."""
        function: Any = node.target
        if all(n in self.values for n in node.all_input_nodes):
            value: Number = function(*(self.values[o] if isinstance(o, fx.Node) else o for o in node.args))
            self.values[node] = value
            self.ops.append(node)
            return value
        return _stand_in_result(function, [self.stand_in(o) if isinstance(o, fx.Node) else o for o in node.args])

    def stand_in(self, node: fx.Node) -> Number:
        """A number to trace with: the true one where it is known, else any of its type."""
        value = self.values.get(node, node.meta.get("val"))
        return value if isinstance(value, int | float) else 1.0

    def compare(self, function: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
        """The answer to a comparison of numbers, of which all nodes must be known; it becomes a guard."""
        answer = bool(function(*(self.values[o] if isinstance(o, fx.Node) else o for o in (left, right))))
        self.guards[(function, left, right)] = answer
        return answer

    def take(self, node: fx.Node) -> Number:
        """The value of a known number; the graph is valid for this value only."""
        value: Number = self.values[node]
        self.guards[(operator.eq, node, value)] = True
        return value

    def follow(self, node: fx.Node) -> None:
        """Runs a tensor op on the known values too, if all its inputs are known; else forgets what it writes into."""
        inputs = node.all_input_nodes
        if not inputs or self.values.keys().isdisjoint(inputs):
            return
        target: Any = node.target
        writes = isinstance(target, OpOverload) and target._schema.is_mutable
        if all(n in self.values for n in inputs) and not self.tensors.isdisjoint(inputs) and (writes or not is_effect(node)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
            with real_tensors():
                self.values[node] = target(*args, **kwargs)
            self.ops.append(node)
            self.tensors.add(node)
        elif writes:
            for written in written_nodes(node):
                self.values.pop(written, None)

    def forget_tensors(self) -> None:
        """Drops all known tensors; numbers stay."""
        self.values = {node: value for node, value in self.values.items() if isinstance(value, int | float)}


def _stand_in_result(function: Callable[..., Any], operands: list[Any]) -> float:
    try:
        return float(function(*operands))
    except (ArithmeticError, ValueError):  # 1 / (1 - 1) of stand-ins
        return 1.0
