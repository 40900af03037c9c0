"""`monoflow::layout_hint`: the op that `mf.to_global(x, sbp=...)` leaves in a captured step, where tensors are whole.

It gives its argument; deduction takes the layout from it, and lowering and compilation leave no trace of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import library

_library = library.Library("monoflow", "DEF")
_library.define("layout_hint(Tensor self, str[] sbp) -> Tensor")
_library.impl("layout_hint", lambda x, sbp: x.clone(), "CompositeExplicitAutograd")


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
