"""Nested arguments and results as flat lists: PyTorch's pytree, and also dataclasses and mappings it does not know."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from monoflow._torch import pytree

Rebuild = Callable[[list[Any]], Any]


def flatten(value: Any) -> tuple[list[Any], Hashable, Rebuild]:
    """(leaves, structure, rebuild): equal structures have equal layouts; `rebuild(leaves)` makes the nested value again."""
    shallow, spec = pytree.tree_flatten(value)
    if not any(_opens(leaf) for leaf in shallow):
        return shallow, spec, lambda leaves: pytree.tree_unflatten(leaves, spec)
    leaves: list[Any] = []
    structure: list[Hashable] = [spec]
    parts: list[tuple[int, Rebuild]] = []
    for leaf in shallow:
        if _opens(leaf):
            inner, inner_structure, fill = flatten(_contents(leaf))
            structure.append((type(leaf), inner_structure))
            parts.append((len(inner), _filler(leaf, fill)))
            leaves.extend(inner)
        else:
            structure.append(None)
            parts.append((1, lambda items: items[0]))
            leaves.append(leaf)

    def rebuild(values: list[Any]) -> Any:
        rebuilt, start = [], 0
        for count, build in parts:
            rebuilt.append(build(values[start : start + count]))
            start += count
        return pytree.tree_unflatten(rebuilt, spec)

    return leaves, tuple(structure), rebuild


def _opens(leaf: Any) -> bool:
    return (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)) or (isinstance(leaf, Mapping) and not isinstance(leaf, dict))


def _contents(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, Mapping):
        return dict(leaf)
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}


def _filler(leaf: Any, fill: Rebuild) -> Rebuild:
    hollow = _refill(leaf, dict.fromkeys(_contents(leaf)))  # keeps no tensor alive
    return lambda items: _refill(hollow, fill(items))


def _refill(leaf: Any, contents: dict[str, Any]) -> Any:
    if isinstance(leaf, Mapping):
        made = copy.copy(leaf)
        made.update(contents)  # type: ignore[attr-defined]
        return made
    made = copy.copy(leaf)
    for name, value in contents.items():
        object.__setattr__(made, name, value)
    return made


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """What a graph depends on of an argument tensor: shape, strides, dtype, device, layout and whether it needs a gradient."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def leaf_key(leaf: Any) -> Hashable:
    """Floats are numbers of the graph (only their type counts); tensors count by metadata; anything else by value."""
    if isinstance(leaf, torch.Tensor):
        return tensor_key(leaf)
    if isinstance(leaf, float):
        return float
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf), id(leaf))
    return (type(leaf), leaf)
