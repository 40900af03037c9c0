"""What the schema of an op says: its name, its arguments by name, and the op that does the same in place or without a write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload

_aten = torch.ops.aten


def op_name(target: OpOverload) -> str:
    """`mm` for every overload of aten.mm, `library::op` for an op of another library."""
    return str(target._schema.name).removeprefix("aten::")


@functools.lru_cache(maxsize=4096)
def tensor_arguments(target: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that are tensors or lists of tensors, in the schema's order."""
    return tuple(a.name for a in target._schema.arguments if "Tensor" in str(a.type))


def bind_arguments(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Schema name -> value, defaults filled in."""
    bound = {}
    for place, argument in enumerate(target._schema.arguments):
        bound[argument.name] = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
    return bound


def is_random(target: Any) -> bool:
    """True for an op that may draw random numbers, and for a callable that says that it does (`draws`)."""
    if isinstance(target, OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return bool(getattr(target, "draws", False))


def positional_and_keywords(target: OpOverload, args: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments by name as a call passes them; defaults are left out at the end, and where they are keywords."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    trailing = 0
    for argument in target._schema.arguments:
        value = args[argument.name]
        default = argument.has_default_value() and _is_default(value, argument.default_value)
        if argument.kwarg_only:
            if not default:
                keywords[argument.name] = value
        else:
            positional.append(value)
            trailing = trailing + 1 if default else 0
    return positional[: len(positional) - trailing], keywords


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, fx.Node) and type(value) is type(default) and bool(value == default)


_TWINS = {
    _aten.bernoulli_.float: _aten.bernoulli.p,
    _aten.normal_.default: _aten.normal_functional.default,
    _aten.fill_.Scalar: _aten.fill.Scalar,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.native_batch_norm.default: _aten._native_batch_norm_legit_functional.default,  # its statistics, see layout/functionalize.py
    _aten._native_batch_norm_legit.default: _aten._native_batch_norm_legit_functional.default,
    _aten._batch_norm_with_update.default: _aten._batch_norm_with_update_functional.default,
    _aten.rrelu_with_noise.default: _aten.rrelu_with_noise_functional.default,
}
"""Where the names do not tell."""


def functional_twin(target: Any) -> OpOverload | None:
    """The op that computes what an op writes: `aten.add.Tensor` for `aten.add_.Tensor` and for `aten.add.out`. None where there is none."""
    if target in _TWINS:
        return _TWINS[target]
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None
    overloads = sorted(packet.overloads(), key=lambda o: o != target._overloadname)  # the one of the same name, if it will do
    fitting = (twin for twin in (getattr(packet, o) for o in overloads) if _takes_the_same(twin, target))
    return next(fitting, None)


def _takes_the_same(twin: OpOverload, target: OpOverload) -> bool:
    """All arguments but those in which `target` is given memory for its results (`out=`)."""
    taken = [str(a.type) for a in twin._schema.arguments]
    given = [str(a.type) for a in target._schema.arguments if not (a.is_out or (a.kwarg_only and a.alias_info is not None))]
    return taken == given and not twin._schema.is_mutable


def inplace_twin(target: Any) -> OpOverload | None:
    """`aten.add_.Tensor` for `aten.add.Tensor`."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_random(target):
        return None
    packet = getattr(_aten, target._schema.name.removeprefix("aten::") + "_", None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    return twin if isinstance(twin, OpOverload) else None
