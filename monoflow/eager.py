"""Global tensors outside of a step: PyTorch's DTensor, and our layout rules for the ops that it has none for.

Importing this registers the rules with DTensor for the process (torch.distributed.tensor.experimental.register_sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor.experimental import register_sharding

from monoflow._torch import OpOverload, has_sharding_rule
from monoflow.errors import RuleError
from monoflow.factories import arange, empty, full, ones, rand, randint, randn, tensor, zeros
from monoflow.global_tensor import distribute, to_global, to_local, to_placements
from monoflow.layout.call import Call
from monoflow.layout.options import flat_tensors, groups_of
from monoflow.layout.table import named_overloads, rule_line
from monoflow.lower.memory import SEEN_AS
from monoflow.lower.pieces import PIECES
from monoflow.lower.sizes import SIZES
from monoflow.sbp import Layout, broadcast
from monoflow.schema import is_random, op_name
from monoflow.whole import full_state_dict

__all__ = [
    "arange",
    "distribute",
    "empty",
    "full",
    "full_state_dict",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "to_global",
    "to_local",
    "zeros",
]


def _without_rule() -> Iterator[OpOverload]:
    """Ops of the table that DTensor cannot lay out, and that pieces can run as they are."""
    for target in named_overloads():
        arguments = [a for a in target._schema.arguments if "Tensor" in str(a.type)]
        plain = arguments and all(str(a.type) in ("Tensor", "Optional[Tensor]") and not a.kwarg_only for a in arguments)
        told = any(op_name(target) in table for table in (SIZES, PIECES, SEEN_AS))  # lowering tells each rank other arguments
        if plain and not told and not is_random(target) and not target._schema.is_mutable and not has_sharding_rule(target):
            yield target


def _shardings(target: OpOverload) -> Callable[..., Any]:
    """What register_sharding asks for: placements of the results and of the arguments, for each way that the rule allows."""

    def shardings(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        ranks = next((a.mesh.size() for a in args if hasattr(a, "mesh")), 1)
        whole = [_blank(a) for a in args]
        with torch.no_grad():
            call = Call(target, tuple(whole), kwargs, target(*whole, **kwargs))
        count = len(list(flat_tensors(call.results)))
        given = [i for i, a in enumerate(whole) if isinstance(a, torch.Tensor)]
        found = [(to_placements(_whole(count)), _placed(args, given, _whole(len(given))))]
        try:
            line = rule_line(call)
            groups = groups_of(call, line) if line is not None else ()
        except RuleError:
            groups = ()
        for option in groups[0].options if groups else ():
            if option.kind != "whole" and not option.even and not option.offset and option.fits(ranks):
                found.append((to_placements(option.outputs), _placed(args, given, option.inputs)))
        return found

    return shardings


def _whole(count: int) -> Layout:
    return (broadcast,) * count


def _placed(args: Any, given: list[int], layouts: Any) -> list[Any]:
    """Placements for the tensors among the arguments, None for the others."""
    by_place = dict(zip(given, to_placements(layouts), strict=True))
    return [by_place.get(i) for i in range(len(args))]


def _blank(value: Any) -> Any:
    """A tensor without memory for what DTensor knows of one."""
    meta = getattr(value, "tensor_meta", None)
    return value if meta is None else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


for _target in _without_rule():
    register_sharding(_target)(_shardings(_target))
