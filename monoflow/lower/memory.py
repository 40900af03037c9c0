"""Ops that look at how their arguments lie in memory: a piece does not lie as the whole does.

Whether an op is said otherwise does not depend on the rank, so that every rank writes the same ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow.lower.emit import Emitter
from monoflow.sbp import Split

aten = torch.ops.aten


def _is_cut(node: fx.Node) -> bool:
    found = [*node.meta["needs"], node.meta["layout"]]
    return any(isinstance(s, Split) for layout in found for s in layout)


def _reshaped(emit: Emitter, node: fx.Node, args: dict[str, Any]) -> fx.Node | None:
    """A view of the whole may be a copy of a piece, and of a value that was gathered."""
    whole = node.all_input_nodes[0].meta["val"]
    if not _is_cut(node) and args["self"].meta["val"].stride() == whole.stride():
        return None
    return emit.call(aten.reshape.default, args["self"], args["size"])


def _squeezed(emit: Emitter, node: fx.Node, args: dict[str, Any]) -> fx.Node | None:
    """Only the dimensions of size one of the whole go; a piece may have more of them."""
    value = node.all_input_nodes[0].meta["val"]
    kept = [d for d in range(value.dim()) if d not in _removed(value, args.get("dim"))]
    shape = args["self"].meta["val"].shape
    return emit.call(aten.reshape.default, args["self"], [shape[d] for d in kept])


def _removed(value: torch.Tensor, given: Any) -> set[int]:
    dims = range(value.dim()) if given is None else [given] if isinstance(given, int) else given
    return {d % value.dim() for d in dims if value.shape[d] == 1} if value.dim() else set()


def _contiguous(target: Any, *names: str) -> Callable[[Emitter, fx.Node, dict[str, Any]], fx.Node]:
    """The op takes these arguments contiguous."""

    def call(emit: Emitter, node: fx.Node, args: dict[str, Any]) -> fx.Node:
        args = {n: emit.call(aten.contiguous.default, v) if n in names else v for n, v in args.items()}
        return emit.call(target, *args.values())

    return call


def _strided(target: Any) -> Callable[[Emitter, fx.Node, dict[str, Any]], fx.Node]:
    """The argument's dimensions come to lie in memory in the order in which those of the whole lay."""

    def call(emit: Emitter, node: fx.Node, args: dict[str, Any]) -> fx.Node:
        whole: torch.Tensor = node.all_input_nodes[0].meta["val"]
        order = sorted(range(whole.dim()), key=lambda d: (whole.stride()[d], whole.shape[d]), reverse=True)
        in_order = emit.call(aten.contiguous.default, emit.call(aten.permute.default, args["self"], order))
        flat = emit.call(aten.reshape.default, in_order, [math.prod(whole.shape)])
        return emit.call(target, flat, *[v for n, v in args.items() if n != "self"])

    return call


SEEN_AS: dict[str, Callable[[Emitter, fx.Node, dict[str, Any]], fx.Node | None]] = {
    **dict.fromkeys(("view", "_unsafe_view"), _reshaped),
    **dict.fromkeys(("squeeze", "squeeze_copy"), _squeezed),
    "view_as_complex": _contiguous(aten.view_as_complex.default, "self"),
    "native_group_norm": _contiguous(aten.native_group_norm.default, "input"),
    "native_group_norm_backward": _contiguous(aten.native_group_norm_backward.default, "grad_out", "input"),
    "as_strided": _strided(aten.as_strided.default),
    "as_strided_copy": _strided(aten.as_strided_copy.default),
}
"""Op -> what is written in its place; None where the op itself will do."""
