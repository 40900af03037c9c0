"""`.grad` of parameters and arguments while a step is captured: what it must be on entry, and what the step leaves in it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from monoflow._torch import bare_mode
from monoflow.capture.graph import GradientRule, Input, Store, Write
from monoflow.capture.recorder import Recorder, node_of
from monoflow.state import Inventory


class SupposedGradientUsed(Exception):
    """The step read a gradient that was only supposed to be there; capture again without supposing any."""


@dataclass(slots=True, eq=False)
class _Tracked:
    """One tensor whose `.grad` is followed: the parameter of that name, or argument number `argument` if it is None."""

    fake: torch.Tensor
    parameter: str | None
    argument: int
    untouched: bool = False
    overwritten: bool = False
    supposed: bool = False
    entered: torch.Tensor | None = None
    placeholder: fx.Node | None = None

    @property
    def name(self) -> str:
        return f"argument_{self.argument}" if self.parameter is None else self.parameter

    def rule(self, on_entry: Literal["any", "none", "tensor"]) -> GradientRule:
        cleared = self.fake.grad is None and (self.entered is not None or self.overwritten)
        return GradientRule(self.parameter, self.argument, on_entry, cleared)

    def write(self) -> Write:
        store = None if self.parameter is None else functools.partial(_gradient_store, self.parameter)
        return Write(f"{self.name}.grad", "gradient", store, self.argument)


class Gradients:
    """The gradients of one capture.

    A parameter whose `.grad` is None on entry but is looked at before any backward pass (`zero_grad()` first) is given a *supposed*
    gradient, so that one graph serves both entries; if the step turns out to use it, the capture is repeated without supposing anything.
    """

    def __init__(self, recorder: Recorder, suppose: bool) -> None:
        self.recorder = recorder
        self.suppose = suppose
        self.tracked: dict[int, _Tracked] = {}

    def add(self, fake: torch.Tensor, real: torch.Tensor, parameter: str | None = None, argument: int = -1) -> None:
        """Follows `.grad` of `fake`, which stands for `real`: the parameter of that name, or that argument."""
        tracked = self.tracked[id(fake)] = _Tracked(fake, parameter, argument)
        if real.grad is not None:
            self._enter(tracked, real.grad)
        else:
            tracked.untouched = fake.requires_grad

    def _enter(self, tracked: _Tracked, like: torch.Tensor) -> None:
        source = Input(f"grad_{tracked.name}", "gradient", index=tracked.argument, parameter=tracked.parameter)
        tracked.fake.grad = tracked.entered = self.recorder.tensor_input(source, like)
        tracked.placeholder = node_of(tracked.entered)

    def read(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Python reads `fake.grad`."""
        tracked = self.tracked.get(id(fake))
        if tracked is not None and tracked.untouched:
            tracked.untouched = False
            if fake.grad is None and self.suppose:
                tracked.supposed = True
                self._enter(tracked, self._like(fake))
        node = node_of(fake.grad) if fake.grad is not None else None
        if node is not None:
            self.recorder.origins.mark_gradient(node)
        return fake.grad

    def assigned(self, fake: torch.Tensor) -> None:
        """Python assigns to `fake.grad`: what was there on entry does not matter, if nothing was added to it yet."""
        tracked = self.tracked.get(id(fake))
        if tracked is not None and tracked.untouched:
            tracked.untouched = False
            tracked.overwritten = fake.grad is None

    def _like(self, fake: torch.Tensor) -> torch.Tensor:
        with bare_mode(self.recorder.fake_mode), torch.no_grad():
            made: torch.Tensor = torch.ops.aten.empty_like.default(fake.detach())
        return made

    def results(self) -> tuple[tuple[GradientRule, ...], list[tuple[Write, fx.Node]]]:
        """What the graph supposes of each gradient on entry, and what it stores. Raises SupposedGradientUsed."""
        rules: list[GradientRule] = []
        writes: list[tuple[Write, fx.Node]] = []
        for tracked in self.tracked.values():
            final = tracked.fake.grad
            read = tracked.placeholder is not None and bool(tracked.placeholder.users)
            if tracked.supposed and (read or final is tracked.entered):
                raise SupposedGradientUsed
            if tracked.placeholder is not None:
                rules.append(tracked.rule("tensor" if read else "any"))
            else:
                rules.append(tracked.rule("none" if final is not None and not tracked.overwritten else "any"))
            if final is not None and final is not tracked.entered:
                writes.append((tracked.write(), self.recorder.value_node(final)))
        return tuple(rules), writes


def _gradient_store(name: str, inventory: Inventory) -> Store:
    return functools.partial(setattr, inventory.entry("parameter", name).tensor, "grad")
