"""Which Python callable runs an op with the least overhead.

Calling `torch.ops.aten.mm.default` converts the arguments by the op's schema on every call; PyTorch's generated Python
binding of the same op (`torch.mm`) is about twice as fast. A binding is used only where a probe has shown that it
dispatches to exactly the same overload with exactly the same arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, TorchDispatchMode, nn_functions, variable_functions
from monoflow.control_edge import after
from monoflow.schema import bind_arguments

_INFIX: dict[Any, str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    operator.getitem: "{}[{}]",
    torch.ops.aten._local_scalar_dense.default: "{}.item()",
    after: "{}",
}


class Bindings:
    """Chooses and remembers callables; one instance per compiled graph."""

    def __init__(self) -> None:
        self._chosen: dict[Any, Callable[..., Any]] = {}

    def infix(self, node: fx.Node) -> str | None:
        """A Python expression for the op, with `{}` for its arguments, or None."""
        return _INFIX.get(node.target) if not node.kwargs else None

    def function(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            return target
        key = (target, tuple(map(_shape_of_argument, node.args)), tuple((k, _shape_of_argument(v)) for k, v in node.kwargs.items()))
        if key not in self._chosen:
            self._chosen[key] = self._choose(node, target)
        return self._chosen[key]

    def _choose(self, node: fx.Node, target: OpOverload) -> Callable[..., Any]:
        name = target._schema.name.removeprefix("aten::")
        for owner in (variable_functions, nn_functions, torch.Tensor):
            candidate = getattr(owner, name, None)
            if candidate is not None and _dispatches_alike(candidate, node, target):
                return candidate
        return target


class _Probed(Exception):
    pass


class _Probe(TorchDispatchMode):
    """Notes the first op that a call dispatches to, and stops it there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Any, Any, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = (func, args, kwargs or {})
        raise _Probed


def _dispatches_alike(candidate: Callable[..., Any], node: fx.Node, target: OpOverload) -> bool:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    probe = _Probe()
    try:
        with torch.no_grad(), probe:
            candidate(*args, **kwargs)
    except _Probed:
        pass
    except (TypeError, RuntimeError, ValueError):
        return False
    if probe.seen is None or probe.seen[0] is not target:
        return False
    return _same([*bind_arguments(target, args, kwargs).values()], [*bind_arguments(target, probe.seen[1], probe.seen[2]).values()])


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    return bool(left == right)


def _shape_of_argument(value: Any) -> Any:
    """Arguments of equal kind choose the same overload."""
    if isinstance(value, fx.Node):
        result = value.meta.get("val")
        return (type(result), result.dim() == 0) if isinstance(result, torch.Tensor) else type(result)
    if isinstance(value, list | tuple):
        return (type(value), *dict.fromkeys(map(_shape_of_argument, value)))
    return type(value)
