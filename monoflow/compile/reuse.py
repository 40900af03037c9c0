"""Lets elementwise ops write into an input that nobody needs afterwards, as autograd does when it sums gradients."""

from __future__ import annotations

import torch
from torch import fx

from monoflow.compile.functionalize import Aliases

_aten = torch.ops.aten

_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.neg.default: _aten.neg_.default,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
}
"""Op -> the same kernel with its first argument as result."""


def reuse_memory(graph: fx.Graph) -> None:
    """Rewrites in place. Results are the same to the bit; fewer tensors are allocated, and less memory is touched."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _IN_PLACE and _fits(node) and aliases.ends_at(node.args[0], node):
            node.target = _IN_PLACE[node.target]
            aliases.merge(node.args[0], node)


def _fits(node: fx.Node) -> bool:
    """True when the first argument has the shape, dtype and strides of the result, without overlaps."""
    first, result = node.args[0], node.meta["val"]
    value = first.meta["val"] if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor) or any(argument is first for argument in node.args[1:]):
        return False
    alike = (value.shape, value.dtype, value.stride()) == (result.shape, result.dtype, result.stride())
    return alike and value.untyped_storage().nbytes() == value.numel() * value.element_size()
