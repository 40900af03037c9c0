"""Replaces an optimizer's chains of ops by PyTorch's fused multi-tensor kernels, and lets these apply the clipping factor.

Not equal to the bit (the kernels order their arithmetic differently), so only for the "inductor" backend.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow.compile.functionalize import Aliases

_aten = torch.ops.aten
_item = _aten._local_scalar_dense.default

Pattern = Any
"""(target, *arguments) for a call, a string for a variable, {name: pattern} last for keyword arguments, anything else for itself."""


@dataclass(frozen=True, slots=True)
class _Fusion:
    """`pattern` matches the last op of one parameter's chain; `fused` takes the lists of what the variables matched."""

    pattern: Pattern
    fused: Any
    decay: bool


_STEP = (_item, (_aten.add_.Tensor, "step", 1))
_NEXT_BIAS1 = (operator.sub, 1, (operator.pow, "beta1", _STEP))
_ROOT_BIAS2 = (operator.pow, (operator.sub, 1, (operator.pow, "beta2", _STEP)), 0.5)


def _adam(parameter: Pattern, gradient: Pattern) -> Pattern:
    """One parameter's chain as torch.optim.Adam and AdamW run it without `foreach` and `fused`, and without amsgrad."""
    mean = (_aten.lerp_.Scalar, "mean", gradient, (operator.sub, 1, "beta1"))
    square = (_aten.addcmul_.default, (_aten.mul_.Tensor, "square", "beta2"), gradient, gradient, {"value": (operator.sub, 1, "beta2")})
    root = (_aten.add_.Tensor, (_aten.div.Tensor, (_aten.sqrt.default, square), _ROOT_BIAS2), "eps")
    return (_aten.addcdiv_.default, parameter, mean, root, {"value": (operator.neg, (operator.truediv, "lr", _NEXT_BIAS1))})


_DECAYED = (_aten.mul_.Tensor, "parameter", (operator.sub, 1, (operator.mul, "lr", "decay")))

_FUSIONS = (
    _Fusion(_adam(_DECAYED, "gradient"), _aten._fused_adamw_.default, decay=True),
    _Fusion(_adam("parameter", (_aten.add.Tensor, "gradient", "parameter", {"alpha": "decay"})), _aten._fused_adam_.default, decay=True),
    _Fusion(_adam("parameter", "gradient"), _aten._fused_adam_.default, decay=False),
)


def fuse_optimizers(graph: fx.Graph) -> None:
    """Rewrites Adam and AdamW chains in place into one fused op per group of equal options."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    groups: dict[Hashable, list[tuple[fx.Node, dict[str, Any], list[fx.Node]]]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_aten.addcdiv_.default):
        for number, fusion in enumerate(_FUSIONS):
            bound: dict[str, Any] = {}
            matched: list[fx.Node] = []
            if _match(fusion.pattern, node, bound, matched):
                value = node.meta["val"]
                options = tuple(bound.get(k) for k in ("lr", "beta1", "beta2", "decay", "eps"))
                groups[(number, options, value.dtype, value.device)].append((node, bound, matched))
                break
    for key, chains in groups.items():
        last = max((node for node, _, _ in chains), key=position.__getitem__)
        if all(position[u] > position[last] for node, _, _ in chains for u in node.users):
            _replace(graph, _FUSIONS[key[0]], chains, last)  # type: ignore[index]
            counts = {n for _, bound, _ in chains for n in bound["step"].users}  # the step counts go on being counted
            dead = {op for _, _, matched in chains for op in matched if op not in counts}
            for op in sorted(dead, key=position.__getitem__, reverse=True):
                if not op.users:
                    graph.erase_node(op)


def _replace(graph: fx.Graph, fusion: _Fusion, chains: list[tuple[fx.Node, dict[str, Any], list[fx.Node]]], last: fx.Node) -> None:
    first = chains[0][1]
    lists = [[bound[name] for _, bound, _ in chains] for name in ("parameter", "gradient", "mean", "square")]
    options = {
        "lr": first["lr"],
        "beta1": first["beta1"],
        "beta2": first["beta2"],
        "weight_decay": first["decay"] if fusion.decay else 0.0,
        "eps": first["eps"],
        "amsgrad": False,
        "maximize": False,
    }
    with graph.inserting_after(last):
        fused = graph.call_function(fusion.fused, (*lists, [], [bound["step"] for _, bound, _ in chains]), options)
    fused.meta.update(op=last.meta["op"], val=None)
    for node, bound, _ in chains:
        node.replace_all_uses_with(bound["parameter"], delete_user_cb=lambda user: user is not fused)


def fuse_clipping(graph: fx.Graph) -> None:
    """`g.mul_(factor)` for each gradient, then a fused Adam: becomes that Adam with `grad_scale=1/factor`, one pass less over memory."""
    for packet in (_aten._fused_adam_, _aten._fused_adamw_):
        for node in graph.find_nodes(op="call_function", target=packet.default):
            if node.kwargs.get("grad_scale") is None:
                _scale_inside(graph, node)


def _scale_inside(graph: fx.Graph, node: fx.Node) -> None:
    gradients: list[fx.Node] = node.args[1]  # type: ignore[assignment]
    aliases = Aliases(graph)
    factors = {_clipping_factor(gradient) for gradient in gradients}
    if len(factors) != 1 or None in factors or not all(map(aliases.is_private_write, gradients)):
        return
    allowed = {node, next(iter(reversed(graph.nodes)))}
    if not all(allowed.issuperset(gradient.users) for gradient in gradients):
        return
    factor: Any = factors.pop()
    with graph.inserting_before(node):
        scale = graph.call_function(_aten.reciprocal.default, (factor,))
    scale.meta.update(op=node.meta["op"], val=factor.meta["val"])
    node.kwargs = {**node.kwargs, "grad_scale": scale}
    for gradient in dict.fromkeys(gradients):
        gradient.replace_all_uses_with(gradient.args[0])  # type: ignore[arg-type]
        graph.erase_node(gradient)


def _clipping_factor(gradient: fx.Node) -> fx.Node | None:
    """The float32 scalar tensor that the gradient is multiplied by in place, or None."""
    if gradient.target is not _aten.mul_.Tensor or gradient.meta["val"].dtype is not torch.float32:
        return None
    factor = gradient.args[1]
    value = factor.meta["val"] if isinstance(factor, fx.Node) else None
    if not isinstance(factor, fx.Node) or not isinstance(value, torch.Tensor):
        return None
    return factor if value.dim() == 0 and value.dtype is torch.float32 else None


def _match(pattern: Pattern, value: Any, bound: dict[str, Any], matched: list[fx.Node]) -> bool:
    if isinstance(pattern, str):
        return bound.setdefault(pattern, value) is value
    if not isinstance(pattern, tuple):
        return not isinstance(value, fx.Node) and bool(value == pattern)
    target, *arguments = pattern
    named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    if (
        not isinstance(value, fx.Node)
        or value.target is not target
        or len(value.args) != len(arguments)
        or value.kwargs.keys() != named.keys()
    ):
        return False
    if value not in matched:
        matched.append(value)
    pairs = [*zip(arguments, value.args, strict=True), *((named[k], value.kwargs[k]) for k in named)]
    return all(_match(part, argument, bound, matched) for part, argument in pairs)
