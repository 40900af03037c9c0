"""The tensors and numbers that a step reads and writes in the user's objects: modules and optimizers.

`State.scan()` makes an `Inventory`: every parameter, buffer, optimizer state tensor and number, each with the *place* it
lives in, and a fingerprint of everything else that decides what a step does (training flags, options, which parameters
need gradients). `Inventory.unchanged()` is the cheap test, run before each call, that nothing was rebound since.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from monoflow._torch import has_lazy_parameters, hook_tables, module_tables, tensor_hooks
from monoflow.errors import StepError
from monoflow.tree import fingerprint, tensor_key

Kind = Literal["parameter", "buffer", "optimizer"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Place:
    """Where a value lives: `container[key]`, or item `index` of the tuple or list found there."""

    container: Any
    key: Any
    index: int | None = None

    def read(self) -> Any:
        value = self.container[self.key]
        return value if self.index is None else value[self.index]

    def write(self, value: Any) -> None:
        if self.index is not None:
            items = list(self.container[self.key])
            items[self.index] = value
            value = type(self.container[self.key])(items)
        self.container[self.key] = value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorEntry:
    """One tensor of the state, under every place that holds it (tied weights have several)."""

    name: str
    kind: Kind
    tensor: torch.Tensor
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NumberEntry:
    """One number of an optimizer: a group option (lr, betas[0], ...) or a count in its per-parameter state."""

    name: str
    place: Place
    kind: type[int] | type[float]

    def fits(self) -> bool:
        """True when the number now in its place can still be passed as this kind (an int does for a float)."""
        try:
            value = self.place.read()
        except (LookupError, TypeError):
            return False
        return isinstance(value, int) and not isinstance(value, bool) if self.kind is int else _is_number(value)

    def read(self) -> int | float:
        return self.kind(self.place.read())


_OPTIMIZER_TABLES = frozenset(("defaults", "state", "param_groups"))


def optimizer_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in attributes of its own: a count of steps, a tensor. Private ones are PyTorch's bookkeeping."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OPTIMIZER_TABLES and not callable(value)
    }


class _Watch:
    """Container entries whose identity must not change between calls, and containers that must keep their size."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.values: list[Any] = []
        self.made_when_missing: list[tuple[dict[Any, Any], Any, Any]] = []
        self.empty: list[Any] = []
        self.sized: list[Any] = []
        self.sizes: list[int] = []

    def entry(self, container: Any, key: Any) -> None:
        if isinstance(container, defaultdict):  # to look for what has gone must not bring it back
            self.made_when_missing.append((container, key, container[key]))
            return
        self.pairs.append((container, key))
        self.values.append(container[key])

    def size(self, container: Any) -> None:
        if container:
            self.sized.append(container)
            self.sizes.append(len(container))
        else:
            self.empty.append(container)

    def unchanged(self) -> bool:
        """Run before each call; most tables of most modules (hooks) are empty, which is cheap to see."""
        if any(self.empty) or list(map(len, self.sized)) != self.sizes:
            return False
        if any(container.get(key) is not value for container, key, value in self.made_when_missing):
            return False
        try:
            return all(map(operator.is_, [c[k] for c, k in self.pairs], self.values))
        except (KeyError, IndexError):
            return False


@dataclass(slots=True, eq=False)
class Inventory:
    """What `State.scan` found. `key` is hashable; two inventories with equal keys can share a graph."""

    tensors: list[TensorEntry]
    numbers: list[NumberEntry]
    key: Hashable
    watch: _Watch
    names: dict[int, str] = field(init=False)
    _by_name: dict[tuple[Kind, str], TensorEntry] = field(init=False)
    _live: list[torch.Tensor] = field(init=False)
    _flags: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {id(entry.tensor): entry.name for entry in self.tensors}
        self._by_name = {(entry.kind, entry.name): entry for entry in self.tensors}
        self._live = [entry.tensor for entry in self.tensors if entry.kind != "optimizer"]
        self._flags = _flags(self._live)

    def entry(self, kind: Kind, name: str) -> TensorEntry:
        """The tensor of that name; an inventory with an equal key has it too."""
        return self._by_name[(kind, name)]

    def unchanged(self) -> bool:
        """True when every object of the state is the one that was scanned, with the same flags, dtype and memory."""
        return self.watch.unchanged() and _flags(self._live) == self._flags and all(number.fits() for number in self.numbers)


class State:
    """The modules and optimizers given to `mf.graph`, named `model`, `model1`, `optimizer`, `optimizer1`, ... in order."""

    def __init__(self, objects: Iterable[nn.Module | Optimizer], names: Iterable[str] | None = None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        given = list(objects)
        labels = list(names) if names is not None else [""] * len(given)
        for value, label in zip(given, labels, strict=True):
            table, default = self._table(value)
            table[label or f"{default}{len(table) or ''}"] = value

    def _table(self, value: object) -> tuple[dict[str, Any], str]:
        if isinstance(value, torch.jit.ScriptModule):
            raise StepError("a torch.jit module runs no Python that could be captured. Give mf.graph the module that it was made from.")
        if isinstance(value, nn.Module):
            return self.modules, "model"
        if isinstance(value, torch.optim.LBFGS):
            raise StepError(
                "torch.optim.LBFGS calls the step's closure as often as its line search asks: no static graph exists. "
                "Use it in plain PyTorch, or another optimizer here."
            )
        if isinstance(value, torch.optim.SparseAdam):
            raise StepError(
                "torch.optim.SparseAdam needs sparse gradients, which a graph does not have. Use Adam, and Embedding(sparse=False)."
            )
        if isinstance(value, Optimizer):
            return self.optimizers, "optimizer"
        raise StepError(
            f"mf.graph takes modules and optimizers, got {type(value).__name__}. Write @mf.graph(model, optimizer); "
            "tensors are passed to the step as arguments."
        )

    def module_paths(self) -> dict[int, str]:
        """id(module) -> qualified name. The first module's own children have bare names, as in its state_dict."""
        paths: dict[int, str] = {}
        for position, (root, module) in enumerate(self.modules.items()):
            prefix = "" if position == 0 else root
            for name, child in module.named_modules():
                paths.setdefault(id(child), ".".join(part for part in (prefix, name) if part))
        return paths

    def scan(self) -> Inventory:
        """Lists every tensor and number of the state. Cost: linear in modules and parameters (no tensor is read)."""
        builder = _Builder()
        for position, (root, module) in enumerate(self.modules.items()):
            if has_lazy_parameters(module):
                raise StepError(f"{root} has lazy parameters without a shape. Run one batch through it in plain PyTorch first.")
            builder.module(module, "" if position == 0 else root)
        for root, optimizer in self.optimizers.items():
            builder.optimizer(optimizer, root)
        return builder.inventory()


MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, for its parameters, hooks and so on."""

_MAX_CONSTANTS = 256
"""Containers of more items than this are watched by identity only."""


class _Builder:
    def __init__(self) -> None:
        self.watch = _Watch()
        self.found: dict[int, tuple[str, Kind, torch.Tensor, list[Place]]] = {}
        self.numbers: list[NumberEntry] = []
        self.key: list[Hashable] = []
        self.seen: set[int] = set()

    def inventory(self) -> Inventory:
        tensors = [TensorEntry(name, kind, tensor, tuple(places)) for name, kind, tensor, places in self.found.values()]
        signature = tuple((e.name, e.kind, tensor_key(e.tensor), e.tensor.is_leaf) for e in tensors)
        return Inventory(tensors, self.numbers, (tuple(self.key), signature), self.watch)

    def tensor(self, name: str, kind: Kind, tensor: torch.Tensor, place: Place) -> None:
        self.watch.entry(place.container, place.key)
        if id(tensor) not in self.found:
            self.found[id(tensor)] = (name, kind, tensor, [])
            for hooks in tensor_hooks(tensor):
                self.hooks(f"hook of {name}", hooks or {})
        self.found[id(tensor)][3].append(place)

    def hooks(self, name: str, table: dict[int, Any]) -> None:
        """A hook is part of the key; adding and removing one is noticed."""
        self.watch.size(table)
        for hook in table:
            self.constant(name, table, hook, table[hook], depth=0)

    def module(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules(prefix=prefix):
            if id(module) in self.seen:
                continue
            self.seen.add(id(module))
            self.attributes(module, name)
            parameters, buffers, children = module_tables(module)
            for table in (parameters, buffers, children):
                self.watch.size(table)
            for child in children:
                self.watch.entry(children, child)
            for hooks in hook_tables(module):
                self.hooks(f"hook of {name or type(module).__name__}", hooks)
            for kind, table in (("parameter", parameters), ("buffer", buffers)):
                for leaf, tensor in table.items():
                    path = f"{name}.{leaf}" if name else leaf
                    if isinstance(tensor, torch.Tensor):
                        self.tensor(path, kind, tensor, Place(table, leaf))  # type: ignore[arg-type]
                    else:
                        self.watch.entry(table, leaf)
                        self.key.append((path, repr(tensor)))

    def attributes(self, module: nn.Module, name: str) -> None:
        """What a module keeps besides parameters and buffers.

        Tensors are followed like buffers. The rest is baked into the graph, hence part of its key: training, dropout.p, a config, ...
        """
        table = vars(module)
        self.watch.size(table)
        for attribute, value in table.items():
            if attribute in MODULE_TABLES:
                continue
            path = f"{name}.{attribute}" if name else attribute
            if isinstance(value, torch.Tensor):
                self.tensor(path, "buffer", value, Place(table, attribute))
            else:
                self.constant(path, table, attribute, value)

    def constant(self, path: str, container: Any, key: Any, value: Any, depth: int = 2) -> None:
        """A value that is part of the key; also the plain values in lists, dicts and settings objects, up to two levels down."""
        self.watch.entry(container, key)
        self.key.append((path, fingerprint(value)))
        if depth and type(value) in (list, tuple):
            self.constants(path, value, dict(enumerate(value)), depth)
        elif depth and type(value) is dict:
            self.constants(path, value, value, depth)
        elif depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
            self.constants(path, vars(value), vars(value), depth)

    def constants(self, path: str, container: Any, items: dict[Any, Any], depth: int) -> None:
        if id(container) in self.seen or len(items) > _MAX_CONSTANTS:
            return
        self.seen.add(id(container))
        self.watch.size(container)
        for key, value in list(items.items()):
            self.constant(f"{path}.{key}", container, key, value, depth - 1)

    def optimizer(self, optimizer: Optimizer, root: str) -> None:
        self.key.append((root, type(optimizer).__qualname__))
        self.watch.entry(optimizer.__dict__, "state")
        self.watch.entry(optimizer.__dict__, "param_groups")
        self.watch.size(optimizer.param_groups)
        self.watch.size(optimizer.state)
        for name, value in optimizer_attributes(optimizer).items():
            self.value(f"{root}.{name}", vars(optimizer), name, value)
        for position, group in enumerate(optimizer.param_groups):
            self.group(optimizer, group, f"{root}.{position}")

    def group(self, optimizer: Optimizer, group: dict[str, Any], root: str) -> None:
        self.watch.size(group)
        self.watch.entry(group, "params")
        self.watch.size(group["params"])
        for option, value in group.items():
            if option != "params":
                self.value(f"{root}.{option}", group, option, value)
        for index, parameter in enumerate(group["params"]):
            self.watch.entry(group["params"], index)
            if id(parameter) not in self.found:
                self.tensor(f"{root}.params.{index}", "parameter", parameter, Place(group["params"], index))
            self.key.append((root, self.found[id(parameter)][0]))
            state = optimizer.state.get(parameter)
            if state:
                self.watch.entry(optimizer.state, parameter)
                self.watch.size(state)
                for entry, value in state.items():
                    self.value(f"{root}.{self.found[id(parameter)][0]}.{entry}", state, entry, value)

    def value(self, name: str, container: Any, key: Any, value: Any) -> None:
        """A group option or an entry of per-parameter state: a tensor, a number, a list of them, or an option."""
        if isinstance(value, torch.Tensor):
            self.tensor(name, "optimizer", value, Place(container, key))
        elif _is_number(value):
            self.number(name, Place(container, key), value)
        elif isinstance(value, tuple):
            if not all(map(_is_number, value)):  # else it may be replaced: schedulers make new betas
                self.watch.entry(container, key)
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self.tensor(f"{name}.{index}", "optimizer", item, Place(container, key, index))
                elif _is_number(item):
                    self.number(f"{name}.{index}", Place(container, key, index), item)
                else:
                    self.key.append((name, index, repr(item)))
        elif isinstance(value, list | dict):
            self.watch.entry(container, key)
            self.watch.size(value)
            for item in range(len(value)) if isinstance(value, list) else list(value):
                self.value(f"{name}.{item}", value, item, value[item])
        else:
            self.watch.entry(container, key)
            self.key.append((name, repr(value)))

    def number(self, name: str, place: Place, value: int | float) -> None:
        kind = int if isinstance(value, int) else float
        self.numbers.append(NumberEntry(name, place, kind))
        self.key.append((name, kind))


def _flags(tensors: list[torch.Tensor]) -> list[Any]:
    """What changes when `tensor.data` is replaced (`model.double()`), `requires_grad_` is called or the first hook is registered."""
    return [(t.requires_grad, t.dtype, t.data_ptr(), *tensor_hooks(t)) for t in tensors]
