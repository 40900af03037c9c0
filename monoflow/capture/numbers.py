"""Numbers as values of the graph: learning rates, betas, step counts.

An optimizer's hyperparameters are Python numbers. While a step is captured they are replaced by `GraphFloat` and
`GraphInt`, which record arithmetic as nodes (`operator.mul` and so on, in the user's order, so that the result is
that of Python to the last bit) and are then arguments of tensor ops. PyTorch's argument parser accepts them because they are
`torch.SymFloat` and `torch.SymInt`.

Comparing two of them yields a plain bool: Python branches on the value of this call, and the comparison becomes a
*guard* of the graph, checked before each later call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from monoflow.errors import CaptureError


class NumberRecorder(Protocol):
    """What a number asks of the recorder it belongs to."""

    def number_op(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> GraphFloat | GraphInt:
        """Records arithmetic."""

    def compare(self, function: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
        """Answers a comparison, by which Python branches."""

    def concrete(self, node: fx.Node) -> int | float:
        """The value itself."""

    def error(self, reason: str, *, op: str = "", fix: str = "") -> CaptureError:
        """An error at the user's line."""


class _SymbolNode:
    """The part of PyTorch's SymNode protocol that C++ calls on a number of ours."""

    def __init__(self, recorder: NumberRecorder, node: fx.Node, kind: type[int] | type[float]) -> None:
        self.recorder = recorder
        self.fx_node = node
        self.kind = kind

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return None

    def maybe_as_float(self) -> float | None:
        return None

    def maybe_as_bool(self) -> bool | None:
        return None

    def guard_int(self, file: str, line: int) -> int:
        return int(self.recorder.concrete(self.fx_node))

    def guard_float(self, file: str, line: int) -> float:
        return float(self.recorder.concrete(self.fx_node))

    def str(self) -> str:
        return self.fx_node.name

    _graph_repr = str


def _operand(value: Any) -> Any:
    return value.node.fx_node if isinstance(value, GraphFloat | GraphInt) else value


def _arithmetic(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if others and isinstance(others[0], torch.Tensor):
            return NotImplemented
        args = tuple(_operand(v) for v in (self, *others))
        return self.node.recorder.number_op(function, args[::-1] if reflected else args)

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def method(self: Any, other: Any) -> bool:
        if not isinstance(other, int | float | GraphFloat | GraphInt):
            return NotImplemented
        return self.node.recorder.compare(function, _operand(self), _operand(other))

    return method


class _Arithmetic:
    """Python's number protocol, recorded."""

    __add__ = _arithmetic(operator.add)
    __radd__ = _arithmetic(operator.add, reflected=True)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(operator.sub, reflected=True)
    __mul__ = _arithmetic(operator.mul)
    __rmul__ = _arithmetic(operator.mul, reflected=True)
    __truediv__ = _arithmetic(operator.truediv)
    __rtruediv__ = _arithmetic(operator.truediv, reflected=True)
    __floordiv__ = _arithmetic(operator.floordiv)
    __rfloordiv__ = _arithmetic(operator.floordiv, reflected=True)
    __mod__ = _arithmetic(operator.mod)
    __rmod__ = _arithmetic(operator.mod, reflected=True)
    __pow__ = _arithmetic(operator.pow)
    __rpow__ = _arithmetic(operator.pow, reflected=True)
    __neg__ = _arithmetic(operator.neg)
    __pos__ = _arithmetic(operator.pos)
    __abs__ = _arithmetic(operator.abs)
    __round__ = _arithmetic(round)
    __floor__ = _arithmetic(math.floor)
    __ceil__ = _arithmetic(math.ceil)
    __trunc__ = _arithmetic(math.trunc)
    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    node: _SymbolNode

    def __bool__(self) -> bool:
        return self.node.recorder.compare(operator.ne, self.node.fx_node, 0)

    def __hash__(self) -> int:
        return id(self.node)

    def __repr__(self) -> str:
        return f"<number {self.node.fx_node.name}>"

    def __str__(self) -> str:
        raise self.node.recorder.error(
            "a number of the step (a learning rate, a float argument) is printed, but the graph prints nothing when it runs",
            fix="print it before or after the call",
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __float__(self) -> float:
        return self.node.guard_float("", 0)

    def __int__(self) -> int:
        return int(self.node.recorder.concrete(self.node.fx_node))

    def __index__(self) -> int:
        return operator.index(self.node.recorder.concrete(self.node.fx_node))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class GraphFloat(_Arithmetic, torch.SymFloat):
    """A float whose value is known when the graph runs. For `isinstance` it is a float."""

    __class__ = property(lambda self: float)


class GraphInt(_Arithmetic, torch.SymInt):
    """An int whose value is known when the graph runs. For `isinstance` it is an int."""

    __class__ = property(lambda self: int)


def graph_number(recorder: NumberRecorder, node: fx.Node, kind: type[int] | type[float]) -> GraphFloat | GraphInt:
    """The number that is the value of `node`."""
    symbol = _SymbolNode(recorder, node, kind)
    return GraphInt(symbol) if kind is int else GraphFloat(symbol)


def symbolic_max(*values: Any) -> Any:
    """`max` that records instead of comparing, for library code whose `max` decides on a value computed on the device."""
    return _symbolic_extreme(max, values)


def symbolic_min(*values: Any) -> Any:
    """`min` that records instead of comparing; see `symbolic_max`."""
    return _symbolic_extreme(min, values)


def _symbolic_extreme(function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    symbols = [v for v in values if isinstance(v, GraphFloat | GraphInt)]
    if not symbols:
        return function(*values)
    return symbols[0].node.recorder.number_op(function, tuple(_operand(v) for v in values))
