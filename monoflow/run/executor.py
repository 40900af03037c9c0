"""Runs one compiled graph on the user's own parameters, buffers and optimizer state."""

from __future__ import annotations

from typing import Any

import torch

from monoflow._torch import below_autograd
from monoflow.capture.graph import Captured
from monoflow.compile.program import Executable
from monoflow.state import Inventory, NumberEntry, TensorEntry


class Executor:
    """A captured step, its executable, and where each of its inputs is found.

    `bind` looks the state's tensors up once; `run` then only fills in arguments, numbers and gradients.
    """

    def __init__(self, captured: Captured, guards: Executable | None) -> None:
        self.captured = captured
        self.executable: Executable | None = None
        self._guards = guards
        self._guard_inputs = _guard_inputs(captured)
        self._arguments = [(p, i.index) for p, i in enumerate(captured.inputs) if i.index >= 0 and i.kind in ("argument", "number")]
        self._gradients = [(p, i.entry, i.index) for p, i in enumerate(captured.inputs) if i.kind == "gradient" and i.entry is not None]
        self._writes = list(enumerate(captured.writes, captured.returned_count))
        self._cleared = [rule for rule in captured.gradients if rule.cleared]
        self._absent = [rule for rule in captured.gradients if rule.on_entry == "none"]
        self._present = [rule for rule in captured.gradients if rule.on_entry == "tensor"]
        self._values: list[Any] = []
        self._numbers: list[tuple[int, NumberEntry]] = []
        self._bound: Inventory | None = None

    def bind(self, inventory: Inventory) -> None:
        """Takes the tensors of `inventory`, which must have the key of the captured one."""
        if self._bound is inventory:
            return
        tensors = {(e.kind, e.name): e.tensor for e in inventory.tensors}
        numbers = {n.name: n for n in inventory.numbers}
        self._values = []
        self._numbers = []
        for position, source in enumerate(self.captured.inputs):
            value: Any = source.value
            if source.kind in ("parameter", "buffer", "optimizer") and source.entry is not None:
                value = tensors[(source.entry.kind, source.entry.name)]
            elif source.number is not None:
                self._numbers.append((position, numbers[source.number.name]))
            self._values.append(value)
        self._bound = inventory

    def accepts(self, leaves: list[Any]) -> bool:
        """True when gradients are there or absent as the graph supposes, and all its guards hold."""
        for rule in self._absent:
            if _tensor_of(rule.entry, rule.argument, leaves).grad is not None:
                return False
        for rule in self._present:
            if _tensor_of(rule.entry, rule.argument, leaves).grad is None:
                return False
        if self._guards is None:
            return True
        values = self._inputs(leaves)
        with torch.no_grad():
            return all(self._guards([values[p] for p in self._guard_inputs]))

    def run(self, leaves: list[Any]) -> Any:
        """One step. `leaves` are the flattened arguments. Returns what the user's function would return."""
        captured = self.captured
        if self.executable is None:
            raise RuntimeError("the graph is not compiled")
        with torch.no_grad(), below_autograd():
            outputs = self.executable(self._inputs(leaves))
        for position, write in self._writes:
            if write.store is not None:
                write.store(outputs[position])
            else:
                leaves[write.argument].grad = outputs[position]
        for rule in self._cleared:
            _tensor_of(rule.entry, rule.argument, leaves).grad = None
        return captured.returned(outputs[: captured.returned_count])

    def _inputs(self, leaves: list[Any]) -> list[Any]:
        values = self._values.copy()
        for position, index in self._arguments:
            values[position] = leaves[index]
        for position, number in self._numbers:
            values[position] = number.read()
        for position, entry, argument in self._gradients:
            values[position] = _tensor_of(entry, argument, leaves).grad
        return values


def _tensor_of(entry: TensorEntry, argument: int, leaves: list[Any]) -> torch.Tensor:
    tensor: torch.Tensor = entry.tensor if argument < 0 else leaves[argument]
    return tensor


def _guard_inputs(captured: Captured) -> list[int]:
    if captured.guards is None:
        return []
    return [p for p, node in enumerate(captured.guards.graph.find_nodes(op="placeholder")) if node.users]
