"""Passes over the laid-out graph: they read and change layouts; what follows from the change is deduced anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from monoflow.errors import GraphError
from monoflow.layout.lay_out import LaidOut, deduced
from monoflow.layout.pins import Pins

LayoutPass: TypeAlias = Callable[[LaidOut], LaidOut | None]
"""Changes the laid-out step it is given and returns it (or None, which means the same)."""


@dataclass(frozen=True, slots=True)
class OnLayout:
    """A pass that runs after layouts are deduced. Made by `mf.on_layout`."""

    run: LayoutPass


def on_layout(layout_pass: LayoutPass) -> OnLayout:
    """Marks a pass for the laid-out graph: `mf.graph(..., passes=[mf.on_layout(my_pass)])`.

    The pass is given a `LaidOut`: `laid.layout("fc1.weight")` is the layout of a parameter, buffer or entry of the optimizer's state,
    `laid.pin("fc1.weight", "S(0)")` sets it, and every other layout and all communication follow from it.
    """
    return OnLayout(layout_pass)


def apply_layout_passes(laid: LaidOut, passes: Iterable[OnLayout], pins: Pins) -> LaidOut:
    """Runs the passes in order, and deduces layouts anew after each. Raises GraphError for a pass that returns something else."""
    for one in passes:
        found: object = one.run(laid) or laid
        if not isinstance(found, LaidOut):
            name = getattr(one.run, "__name__", type(one.run).__name__)
            raise GraphError(f"after pass {name}: a layout pass returns the laid-out step it was given, got {type(found).__name__}")
        laid = deduced(found.captured, found.placement, pins, found.schedule)
    return laid
