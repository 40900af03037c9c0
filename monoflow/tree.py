"""Nested arguments and results as flat lists: lists, tuples, dicts, dataclasses, mappings, and what PyTorch's pytree knows.

Written for the call path of a step, where PyTorch's own flattening would cost tens of microseconds.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from monoflow._torch import pytree
from monoflow.errors import StepError

Rebuild = Callable[[list[Any]], Any]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Immutable values that count by what they are rather than by which object they are."""

_LEAF = "*"
_LEAF_TYPES = (torch.Tensor, int, float, str, bytes, type(None), torch.Size, torch.dtype, torch.device, type)


def flatten(value: Any, objects: bool = False) -> tuple[list[Any], Hashable, Rebuild]:
    """(leaves, structure, rebuild): equal structures have equal layouts; `rebuild(leaves)` makes the nested value again.

    With `objects`, other objects that hold tensors in their attributes are opened as well. `rebuild` keeps `value` alive; see `rebuilder`
    for one that does not.
    """
    leaves: list[Any] = []
    structure = _collect(value, leaves, objects)
    return leaves, structure, lambda items: rebuilder(value, objects)(items)


def rebuilder(value: Any, objects: bool = False) -> Rebuild:
    """The `rebuild` of `flatten(value, objects)`, which keeps no leaf of it alive."""
    build = _builder(value, objects)
    return lambda items: build(iter(items))


def _collect(value: Any, leaves: list[Any], objects: bool) -> Hashable:
    """Appends the leaves of `value`; returns its structure."""
    opened = _open(value, objects)
    if opened is None:
        leaves.append(value)
        return _LEAF
    children, key, _ = opened
    kind: Any = type(value)
    return (kind, key, *[_collect(child, leaves, objects) for child in children])


def leaf_names(value: Any, name: str) -> list[str]:
    """A dotted name for each leaf of `flatten(value)`: keys of dictionaries, names of fields, numbers in lists."""
    opened = _open(value, False)
    if opened is None:
        return [name]
    children, keys, _ = opened
    named = isinstance(keys, tuple) and len(keys) == len(children) and all(isinstance(k, str) for k in keys)
    labels = [str(k) for k in keys] if named else [str(i) for i in range(len(children))]  # type: ignore[attr-defined]
    return [found for child, label in zip(children, labels, strict=True) for found in leaf_names(child, f"{name}.{label}")]


def _builder(value: Any, objects: bool) -> Callable[[Iterator[Any]], Any]:
    opened = _open(value, objects)
    if opened is None:
        return next
    children, _, close = opened
    builders = [_builder(child, objects) for child in children]
    return lambda items: close([build(items) for build in builders])


_Opened = tuple[list[Any], Hashable, Callable[[list[Any]], Any]]


def _open(value: Any, objects: bool) -> _Opened | None:
    """(children, what else its structure depends on, how to make it of new children); None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value, None, kind
    if kind is dict:
        return list(value.values()), tuple(value), lambda children, keys=tuple(value): dict(zip(keys, children, strict=True))
    if isinstance(value, _LEAF_TYPES):
        return None
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        children, context = registered.flatten_fn(value)
        return list(children), _hashable(context), lambda children: registered.unflatten_fn(children, context)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), None, lambda children: kind(*children)
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return [getattr(value, name) for name in names], names, _refilling(value, names)
    if isinstance(value, Mapping):
        return list(value.values()), tuple(value), _refilling_mapping(value, tuple(value))
    if objects and holds_tensors(value):
        return list(vars(value).values()), tuple(vars(value)), _refilling(value, tuple(vars(value)))
    return None


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """True for a tensor, and for an object or container with a tensor in its attributes or items, a few levels down."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, torch.nn.Module | type | types.ModuleType | types.FunctionType):
        return False
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(holds_tensors(item, depth - 1) for item in [*inside, *getattr(value, "__dict__", {}).values()])


def _hashable(context: Any) -> Hashable:
    if isinstance(context, list | tuple):
        return tuple(map(_hashable, context))
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return context


def _refilling(value: Any, names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    """Makes copies of an object with other values in its attributes, also if it is frozen, without calling its __init__."""

    def fill(template: Any, children: list[Any]) -> Any:
        made = copy.copy(template)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    hollow = fill(value, [None] * len(names))
    return lambda children: fill(hollow, children)


def _refilling_mapping(value: Any, keys: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    def fill(template: Any, children: list[Any]) -> Any:
        made = copy.copy(template)
        made.update(zip(keys, children, strict=True))
        return made

    hollow = fill(value, [None] * len(keys))
    return lambda children: fill(hollow, children)


# What a graph depends on of its arguments


class ByIdentity:
    """Stands in a key for an object that is equal to itself only. Keeps it alive, so that no other object gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def fingerprint(value: Any) -> Hashable:
    """Plain values, and tuples of them, count by type and value, anything else by identity."""
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, tuple):
        return (type(value), *map(fingerprint, value))
    return ByIdentity(value)


def same_value(left: Any, right: Any) -> bool:
    """The same object, or equal plain values of one type."""
    return left is right or (type(left) in PLAIN and type(left) is type(right) and bool(left == right))


def arguments_key(leaves: list[Any], known: Mapping[int, str]) -> Hashable:
    """What a graph depends on of its arguments.

    Tensors count by metadata, and by which of them are the same object or one of the state (`known`: id -> name); floats are numbers of
    the graph, so that only their type counts; anything else counts by value.

    Raises: StepError for NumPy arrays, whose values may change without notice.
    """
    keys: list[Hashable] = []
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            same = known.get(id(leaf)) or first.setdefault(id(leaf), position)
            keys.append((tensor_key(leaf), None if same == position else same))
        else:
            keys.append(_leaf_key(leaf))
    return tuple(keys)


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """What a graph depends on of a tensor: shape, strides, dtype, device and whether it needs a gradient; where a global one lies."""
    plain = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (*plain, str(tensor.device_mesh), str(tensor.placements)) if is_global(tensor) else plain  # type: ignore[attr-defined]


def is_global(value: object) -> bool:
    """True for a global tensor (PyTorch's DTensor), which nobody has where its module is not imported: that takes time."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, float):
        return float
    if type(leaf).__module__ == "numpy" and type(leaf).__name__ == "ndarray":
        raise StepError("an argument of the step is a NumPy array: pass torch.as_tensor(array)")
    try:
        hash(leaf)
    except TypeError:
        return ByIdentity(leaf)
    return (type(leaf), leaf)
