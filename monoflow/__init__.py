"""monoflow: one training step, written for one device, as one static graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monoflow import errors, nn, sbp
from monoflow.capture import StepGraph
from monoflow.explain import Plan
from monoflow.layout.register import register_rule
from monoflow.placement import Placement as placement
from monoflow.rewrite import Zero, on_layout
from monoflow.source import Frame, OpInfo
from monoflow.step import Step, graph
from monoflow.world import simulate

if TYPE_CHECKING:
    from monoflow.eager import (
        arange,
        distribute,
        empty,
        full,
        full_state_dict,
        ones,
        rand,
        randint,
        randn,
        tensor,
        to_global,
        to_local,
        zeros,
    )

__version__ = "0.1.0"

__all__ = [
    "Frame",
    "OpInfo",
    "Plan",
    "Step",
    "StepGraph",
    "Zero",
    "arange",
    "distribute",
    "empty",
    "errors",
    "full",
    "full_state_dict",
    "graph",
    "nn",
    "on_layout",
    "ones",
    "placement",
    "rand",
    "randint",
    "randn",
    "register_rule",
    "sbp",
    "simulate",
    "tensor",
    "to_global",
    "to_local",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """The public names that are not here yet: they need torch.distributed.tensor, whose import takes a second that one device saves."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from monoflow import eager

    return getattr(eager, name)
