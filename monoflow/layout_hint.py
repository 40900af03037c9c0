"""`monoflow::layout_hint`: the op that `mf.to_global(x, sbp=...)` leaves in a captured step, where tensors are whole.

It gives its argument; deduction takes the layout from it, and lowering and compilation leave no trace of it. Passes insert hints as well;
where `alone` is true, the value in that layout is for the users of the hint only: nothing else finds it there, and it is gone after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, library

from monoflow.sbp import Layout

_library = library.Library("monoflow", "DEF")
_library.define("layout_hint(Tensor self, str[] sbp, bool alone=False) -> Tensor")
_library.impl("layout_hint", lambda x, sbp, alone=False: x.clone(), "CompositeExplicitAutograd")


class _Hint(torch.autograd.Function):
    """The gradient goes through as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sbp: list[str]) -> torch.Tensor:
        found: torch.Tensor = torch.ops.monoflow.layout_hint(x, sbp)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def hint(x: torch.Tensor, sbp: Sequence[str]) -> torch.Tensor:
    """`x`, with a note in the graph that it shall lie so."""
    found: torch.Tensor = _Hint.apply(x, list(sbp))
    return found


def is_hint(target: object) -> bool:
    """True for the target of a node that is a hint."""
    return target is torch.ops.monoflow.layout_hint.default


def is_alone(node: fx.Node) -> bool:
    """True for a hint whose value is for its own users only."""
    return len(node.args) > 2 and bool(node.args[2])


def insert_hint(node: fx.Node, sbp: Layout, users: Iterable[fx.Node], alone: bool = False) -> fx.Node:
    """A hint between a node and some of its users, before the first of them."""
    users = list(users)
    with node.graph.inserting_before(min(users)):
        made = node.graph.call_function(torch.ops.monoflow.layout_hint.default, (node, [str(s) for s in sbp], alone))
    made.meta["val"] = node.meta["val"]
    made.meta["op"] = min(users).meta["op"]
    for user in users:
        user.replace_input_with(node, made)
    return made
