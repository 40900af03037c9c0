"""One op call of a graph, as rules see it: arguments by name, shapes, results."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.schema import bind_arguments, tensor_arguments


class Call:
    """An op with its arguments.

    `args` maps every name of the schema to its value, defaults filled in; tensors are fake ones of the whole shape.
    """

    def __init__(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.target = target
        self.args = bind_arguments(target, args, kwargs)
        self.result = result

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        target: Any = node.target
        return cls(target, args, kwargs, node.meta.get("val"))

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor argument."""
        return tuple(self.args[name].shape)

    def rank(self, name: str) -> int:
        """Number of dimensions of a tensor argument."""
        return int(self.args[name].dim())

    def dims(self, name: str, of: str = "self") -> list[int]:
        """The dimension(s) in argument `name` as non-negative numbers, in the order given.

        All of them for None or []. `of` is the tensor meant.
        """
        return normal_dims(self.args[name], self.rank(of))

    @functools.cached_property
    def terms(self) -> list[tuple[int, bool, list[torch.Tensor]]]:
        """For each tensor argument that is there: its place among the schema's tensor arguments, whether it is a list, its tensors."""
        found = []
        for place, name in enumerate(tensor_arguments(self.target)):
            value = self.args[name]
            if isinstance(value, torch.Tensor):
                found.append((place, False, [value]))
            elif isinstance(value, list | tuple):
                found.append((place, True, list(value)))
        return found

    @functools.cached_property
    def results(self) -> list[Any]:
        """The results, one for each return of the schema; a list where the op returns a list."""
        if len(self.target._schema.returns) == 1:
            return [self.result]
        return list(self.result) if isinstance(self.result, list | tuple) else [self.result]


def normal_dims(given: Any, rank: int) -> list[int]:
    """Dimension numbers counted from the front; every dimension for None or an empty list."""
    dims = [given] if isinstance(given, int) else list(given or range(rank))
    return [d % rank if rank else 0 for d in dims] if rank else []


def letters(count: int, skip: str = "") -> list[str]:
    """Names of `count` factors."""
    names = [c for c in "abcdefghijklmnopqrstuvwxyz" if c not in skip]
    return [names[i] if i < len(names) else f"f{i}" for i in range(count)]


def held(names: list[str], dims: Container[int]) -> list[str]:
    """The factors, with those of `dims` marked as ones that stay whole."""
    return [f"{n}!" if d in dims else n for d, n in enumerate(names)]


def changed(names: list[str], dims: Container[int]) -> list[str]:
    """The factors, with dimensions of another size, never cut, in the places of `dims`."""
    return ["1" if d in dims else n for d, n in enumerate(names)]


def left_out(names: list[str], dims: Container[int]) -> list[str]:
    """The factors without those of `dims`."""
    return [n for d, n in enumerate(names) if d not in dims]


def term(factors: list[str]) -> str:
    """The text of a term; `.` for a tensor of no dimension."""
    return " ".join(factors) or "."
