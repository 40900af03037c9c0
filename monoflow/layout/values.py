"""How layouts are kept on a graph's nodes.

meta["layout"]   of a node with tensors: its Layout, or a list of these (nested as its value is), None for what is no tensor
meta["needs"]    of a call or the output: the Layout that each of its tensor arguments is converted to, in the order of `tensor_inputs`
meta["rule"]     of an op: the line by which it was laid out, None where there is no rule
meta["offsets"]  of an op that must know where its pieces start: the factor that is cut and its size, for each mesh dimension
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.sbp import Layout, broadcast
from monoflow.schema import bind_arguments, tensor_arguments


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes of a call's tensor arguments, flat, in the order of the op's schema; of other nodes, in the order of their arguments."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        bound = bind_arguments(node.target, node.args, node.kwargs)
        values: Any = [bound[name] for name in tensor_arguments(node.target)]
    else:
        values = [node.args, *node.kwargs.values()]
    return [n for n in _nodes(values) if isinstance(n.meta.get("val"), torch.Tensor)]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        yield from _nodes(list(value.values()))


def map_layouts(value: Any, layouts: Iterator[Layout]) -> Any:
    """`layouts`, given flat, nested as `value` is."""
    if isinstance(value, torch.Tensor):
        return next(layouts)
    if isinstance(value, list | tuple):
        return [map_layouts(item, layouts) for item in value]
    return None


def layout_of(node: fx.Node) -> Layout:
    """The layout of a node whose value is one tensor."""
    found: Layout = node.meta["layout"]
    return found


def is_item(node: fx.Node) -> bool:
    """True for a node that takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def whole_layout(mesh_dims: int) -> Layout:
    """B on every mesh dimension."""
    return (broadcast,) * mesh_dims
