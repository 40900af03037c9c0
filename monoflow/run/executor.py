"""Runs one compiled graph on the user's own parameters, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from monoflow._torch import below_autograd
from monoflow.capture.graph import Captured, Store
from monoflow.compile.program import Executable
from monoflow.schema import is_random
from monoflow.state import Inventory, NumberEntry

_Owner = torch.Tensor | int
"""Whose `.grad` is meant: a parameter, or the argument of that number."""


_KEEP_FOR_BACKWARD = (torch.ops.aten.mkldnn_rnn_layer.default,)
"""Ops whose kernels keep what their gradient needs only in grad mode, whether or not autograd runs."""


class Executor:
    """A captured step, its executable, and where each of its inputs is found.

    `bind` looks the state's tensors up once; `run` then only fills in arguments, numbers and gradients.

    Args:
        graph: what is to be compiled, if not the captured graph itself: the same placeholders and outputs over a rank's pieces.
        take: makes what the graph computes with of a tensor of the user's.
        outputs: for each output, what makes the user's tensor of it; None where it is that already.
    """

    def __init__(
        self,
        captured: Captured,
        guards: Executable | None,
        graph: fx.Graph | None = None,
        take: Callable[[Any], Any] | None = None,
        outputs: Sequence[Callable[[Any], Any] | None] = (),
    ) -> None:
        self.captured = captured
        self.graph = captured.graph.graph if graph is None else graph
        self.executable: Executable | None = None
        self._take = take
        self._made = [(position, make) for position, make in enumerate(outputs) if make is not None]
        self._guards = guards
        self._guard_inputs = _guard_inputs(captured)
        self._arguments = [(p, i.index) for p, i in enumerate(captured.inputs) if i.index >= 0 and i.kind in ("argument", "number")]
        self._gradients: list[tuple[int, _Owner]] = []
        self._writes: list[tuple[int, Store | None, int]] = []
        self._cleared: list[_Owner] = []
        self._absent: list[_Owner] = []
        self._present: list[_Owner] = []
        self.draws = any(is_random(n.target) for n in self.graph.nodes)
        """Whether the graph draws random numbers."""
        self._grad_mode = any(n.target in _KEEP_FOR_BACKWARD for n in self.graph.nodes)
        self._taken = [p for p, i in enumerate(captured.inputs) if i.kind in ("argument", "gradient")]
        self._values: list[Any] = []
        self._numbers: list[tuple[int, NumberEntry]] = []
        self._bound: Inventory | None = None

    def bind(self, inventory: Inventory) -> None:
        """Takes the tensors of `inventory`, which must have the key of the captured one."""
        if self._bound is inventory:
            return
        numbers = {n.name: n for n in inventory.numbers}
        self._values = []
        self._numbers = []
        self._gradients = []
        for position, source in enumerate(self.captured.inputs):
            value: Any = source.value
            if source.kind == "parameter" or source.kind == "buffer" or source.kind == "optimizer":
                value = inventory.entry(source.kind, source.name).tensor
                value = value if self._take is None else self._take(value)
            elif source.kind == "gradient":
                self._gradients.append((position, _owner(source.parameter, source.index, inventory)))
            elif source.kind == "number" and source.index < 0:
                self._numbers.append((position, numbers[source.name]))
            self._values.append(value)
        self._writes = [
            (position, None if write.bind is None else write.bind(inventory), write.argument)
            for position, write in enumerate(self.captured.writes, self.captured.returned_count)
        ]
        rules = [(rule, _owner(rule.parameter, rule.argument, inventory)) for rule in self.captured.gradients]
        self._cleared = [owner for rule, owner in rules if rule.cleared]
        self._absent = [owner for rule, owner in rules if rule.on_entry == "none"]
        self._present = [owner for rule, owner in rules if rule.on_entry == "tensor"]
        self._bound = inventory

    def accepts(self, leaves: list[Any]) -> bool:
        """True when gradients are there or absent as the graph supposes, and all its guards hold."""
        for owner in self._absent:
            if _tensor_of(owner, leaves).grad is not None:
                return False
        for owner in self._present:
            if _tensor_of(owner, leaves).grad is None:
                return False
        if self._guards is None:
            return True
        values = self._inputs(leaves)
        with torch.no_grad():
            return all(self._guards([values[p] for p in self._guard_inputs]))

    def held_tensors(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The tensors that the graph takes in."""
        return [value for value in self._inputs(leaves) if isinstance(value, torch.Tensor)]

    def run(self, leaves: list[Any]) -> Any:
        """One step. `leaves` are the flattened arguments. Returns what the user's function would return."""
        captured = self.captured
        if self.executable is None:
            raise RuntimeError("the graph is not compiled")
        with torch.set_grad_enabled(self._grad_mode and torch.is_grad_enabled()), below_autograd():
            outputs = self.executable(self._inputs(leaves))
        for position, make in self._made:
            outputs[position] = make(outputs[position])
        for position, store, argument in self._writes:
            if store is not None:
                store(outputs[position])
            else:
                leaves[argument].grad = outputs[position]
        for owner in self._cleared:
            _tensor_of(owner, leaves).grad = None
        return captured.returned(outputs[: captured.returned_count])

    def _inputs(self, leaves: list[Any]) -> list[Any]:
        values = self._values.copy()
        for position, index in self._arguments:
            values[position] = leaves[index]
        for position, number in self._numbers:
            values[position] = number.read()
        for position, owner in self._gradients:
            values[position] = _tensor_of(owner, leaves).grad
        if self._take is not None:
            for position in self._taken:
                values[position] = self._take(values[position])
        return values


def _owner(parameter: str | None, argument: int, inventory: Inventory) -> _Owner:
    return argument if parameter is None else inventory.entry("parameter", parameter).tensor


def _tensor_of(owner: _Owner, leaves: list[Any]) -> torch.Tensor:
    tensor: torch.Tensor = leaves[owner] if isinstance(owner, int) else owner
    return tensor


def _guard_inputs(captured: Captured) -> list[int]:
    if captured.guards is None:
        return []
    return [p for p, node in enumerate(captured.guards.graph.find_nodes(op="placeholder")) if node.users]
