"""Puts traced tensors and numbers in the place of the user's, reads back what the step made of them, and restores everything."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from monoflow._torch import FakeTensor, flat_weights, init_group, module_tables
from monoflow.capture.graph import Store, Write
from monoflow.capture.numbers import GraphFloat, GraphInt
from monoflow.capture.recorder import Recorder, node_of
from monoflow.state import Inventory, Kind, Place, State, TensorEntry, optimizer_attributes
from monoflow.tree import same_value


class Swapped:
    """The user's modules and optimizers while a step is captured."""

    def __init__(self, state: State, inventory: Inventory, recorder: Recorder) -> None:
        self.state = state
        self.inventory = inventory
        self.recorder = recorder
        self.modules = list(dict.fromkeys(m for root in state.modules.values() for m in root.modules()))
        self.tables = [(module, table, set(table)) for module in self.modules for table in module_tables(module)[:2]]
        self.placed: dict[int, dict[str, Any]] = {}
        self.numbers: dict[tuple[int, Any, int | None], GraphFloat | GraphInt] = {}

    def number(self, place: Place, traced: GraphFloat | GraphInt) -> None:
        """`traced` goes where the number is read from."""
        self.numbers[(id(place.container), place.key, place.index)] = traced

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Everything is swapped inside, and put back after."""
        with contextlib.ExitStack() as exits:
            for entry in self.inventory.tensors:
                if entry.kind != "optimizer":
                    for place in _own_places(entry):
                        exits.callback(place.write, entry.tensor)
                        place.write(self._twin(entry.tensor))
            for _, table, _ in self.tables:
                exits.callback(_forget_new, table, set(table))
            for module in self.modules:
                exits.enter_context(flat_weights(module))
            for optimizer in self.state.optimizers.values():
                self._swap_optimizer(exits, optimizer)
            yield

    def _swap_optimizer(self, exits: contextlib.ExitStack, optimizer: Optimizer) -> None:
        state = optimizer.state
        exits.callback(setattr, optimizer, "state", state)
        traced: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, values in state.items():
            traced[self._twin(parameter)] = twin_values = {k: self._traced(v, values, k) for k, v in values.items()}
            self.placed[id(twin_values)] = _frozen_items(twin_values)
        optimizer.state = traced
        for group in optimizer.param_groups:
            exits.callback(_restore, group, dict(group))
            for option, value in list(group.items()):
                group[option] = [self._twin(p) for p in value] if option == "params" else self._traced(value, group, option)
            self.placed[id(group)] = _frozen_items(group)
        attributes = optimizer_attributes(optimizer)
        exits.callback(vars(optimizer).update, attributes)
        swapped = {name: self._traced(value, vars(optimizer), name) for name, value in attributes.items()}
        vars(optimizer).update(swapped)
        self.placed[id(optimizer)] = _frozen_items(swapped)

    def _twin(self, value: Any) -> Any:
        found = self.recorder.twin_of(value) if isinstance(value, torch.Tensor) else None
        return value if found is None else found

    def _traced(self, value: Any, container: Any, key: Any) -> Any:
        """What stands for an option or state entry while the step runs."""
        if isinstance(value, torch.Tensor):
            return self._twin(value)
        found = self.numbers.get((id(container), key, None))
        if found is not None:
            return found
        if isinstance(value, tuple):
            return tuple(self.numbers.get((id(container), key, i), self._twin(v)) for i, v in enumerate(value))
        if isinstance(value, list):
            return [self._traced(v, value, i) for i, v in enumerate(value)]
        if isinstance(value, dict):
            return {k: self._traced(v, value, k) for k, v in value.items()}
        return value

    # Reading back, while still swapped

    def writes(self) -> Iterator[tuple[Write, fx.Node | Any]]:
        """Every value that the step rebound: buffers assigned anew, optimizer state created, numbers counted up."""
        yield from self._module_writes()
        for root, optimizer in self.state.optimizers.items():
            yield from self._optimizer_writes(root, optimizer)

    def _module_writes(self) -> Iterator[tuple[Write, fx.Node]]:
        for module, table, before in self.tables:
            for name in table:
                if name not in before:
                    raise self.recorder.error(
                        f"the step registers `{name}` in a {type(module).__name__}",
                        fix="create parameters and buffers before the first call",
                    )
        for entry in self.inventory.tensors:
            if entry.kind == "optimizer":
                continue
            for index, place in enumerate(_own_places(entry)):
                now = place.container.get(place.key)
                if now is self._twin(entry.tensor):
                    continue
                node = node_of(now) if isinstance(now, torch.Tensor) else None
                if node is None:
                    raise self.recorder.error(
                        f"the step removes {entry.kind} {entry.name} of the module, or assigns something that it did not compute",
                        fix=f"assign a tensor computed in the step, or update in place: {entry.name}.copy_(value)",
                    )
                yield Write(entry.name, "buffer", _PlaceStore(entry.kind, entry.name, index)), node

    def _optimizer_writes(self, root: str, optimizer: Optimizer) -> Iterator[tuple[Write, Any]]:
        names = {id(self._twin(e.tensor)): e.name for e in self.inventory.tensors if e.kind == "parameter"}
        for twin, values in optimizer.state.items():
            if id(twin) not in names and values:
                raise self.recorder.error("the optimizer keeps state for a tensor that is none of its parameters", op=f"state of {root}")
            for name, node in self._rebound(values, f"{root}.state"):
                yield Write(f"{root}.{name}", "optimizer", _StateStore(optimizer, names[id(twin)], name)), node
        for position, group in enumerate(optimizer.param_groups):
            for name, node in self._rebound(group, f"{root}.{position}"):
                yield Write(f"{root}.{position}.{name}", "number", _OptionStore(optimizer, position, name)), node
        placed = self.placed[id(optimizer)]
        for name, node in self._rebound(optimizer_attributes(optimizer), root, placed):
            yield Write(f"{root}.{name}", "number", _AttributeStore(optimizer, name)), node

    def _rebound(self, table: dict[str, Any], name: str, placed: dict[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
        """(key, new value) of every entry that is not the one put there by `active`."""
        placed = self.placed.get(id(table), {}) if placed is None else placed
        for key, value in table.items():
            if key != "params" and (key not in placed or not _unchanged(value, placed[key])):
                yield key, self._value_node(value, f"{name}.{key}")

    def _value_node(self, value: Any, name: str) -> Any:
        if isinstance(value, FakeTensor):
            return node_of(value)
        if isinstance(value, GraphFloat | GraphInt):
            return value.node.fx_node
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise self.recorder.error(
            f"the optimizer changes a {type(value).__name__} in its state ({name}) in the step",
            fix="keep tensors and numbers in the optimizer's state, not lists or dicts of them that change",
        )


def _own_places(entry: TensorEntry) -> list[Place]:
    """The places in modules; a parameter that only an optimizer has is swapped with its param group."""
    return [place for place in entry.places if isinstance(place.container, dict)]


def _restore(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    table.clear()
    table.update(before)


def _forget_new(table: dict[str, Any], before: set[str]) -> None:
    for key in [key for key in table if key not in before]:
        del table[key]


def _frozen_items(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _frozen(value) for key, value in table.items()}


def _frozen(value: Any) -> Any:
    """A copy of the containers in `value`, to compare with later."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def _unchanged(value: Any, frozen: Any) -> bool:
    if isinstance(value, list | tuple):
        return isinstance(frozen, tuple) and len(value) == len(frozen) and all(map(_unchanged, value, frozen))
    if isinstance(value, dict):
        return isinstance(frozen, dict) and value.keys() == frozen.keys() and all(_unchanged(value[key], frozen[key]) for key in value)
    return same_value(value, frozen)


@dataclass(frozen=True, slots=True)
class _PlaceStore:
    """Into place number `index` of a parameter or buffer."""

    kind: Kind
    name: str
    index: int

    def __call__(self, inventory: Inventory) -> Store:
        return inventory.entry(self.kind, self.name).places[self.index].write


@dataclass(frozen=True, slots=True)
class _StateStore:
    """Into the optimizer's state for a parameter."""

    optimizer: Optimizer
    parameter: str
    key: str

    def __call__(self, inventory: Inventory) -> Store:
        parameter = inventory.entry("parameter", self.parameter).tensor
        return lambda value: operator.setitem(self.optimizer.state[parameter], self.key, value)


@dataclass(frozen=True, slots=True)
class _OptionStore:
    """Into a param group of the optimizer."""

    optimizer: Optimizer
    group: int
    key: str

    def __call__(self, inventory: Inventory) -> Store:
        return functools.partial(operator.setitem, self.optimizer.param_groups[self.group], self.key)


@dataclass(frozen=True, slots=True)
class _AttributeStore:
    """Into an attribute of the optimizer itself."""

    optimizer: Optimizer
    name: str

    def __call__(self, inventory: Inventory) -> Store:
        return functools.partial(setattr, self.optimizer, self.name)


@contextlib.contextmanager
def fresh_optimizer_state(state: State) -> Iterator[set[tuple[int, Any]]]:
    """Creates missing optimizer state, so that the first call has the same graph as later ones.

    Taken back if the body raises; else whatever key of the yielded set of (optimizer, parameter) the body leaves in it is taken back
    (parameters that turned out to have no gradient: eager PyTorch creates no state for them).
    """
    before = {id(o): [(p, values, dict(values)) for p, values in o.state.items()] for o in state.optimizers.values()}
    created: set[tuple[int, Any]] = set()
    try:
        for optimizer in state.optimizers.values():
            known = set(optimizer.state)
            _initialize(optimizer)
            created |= {(id(optimizer), p) for p in optimizer.state if p not in known}
        yield created
    except BaseException:
        for optimizer in state.optimizers.values():
            optimizer.state.clear()
            for parameter, values, entries in before[id(optimizer)]:
                _restore(values, entries)
                optimizer.state[parameter] = values
        raise
    for optimizer in state.optimizers.values():
        for identity, parameter in created:
            if identity == id(optimizer):
                optimizer.state.pop(parameter, None)


def _initialize(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if p.requires_grad and p.grad is None]
        try:
            for parameter in missing:
                parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
            init_group(optimizer, group)
        finally:
            for parameter in missing:
                parameter.grad = None
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0:
            _zero_momentum(optimizer, group)


def _zero_momentum(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """SGD starts with the first gradient as momentum; without dampening, a buffer of zeros gives the same."""
    for parameter in group["params"]:
        if parameter.requires_grad and optimizer.state.get(parameter, {}).get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
