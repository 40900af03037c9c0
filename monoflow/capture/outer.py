"""The Python values outside of a step that its code can reach: variables, containers, attributes of objects.

Two rooms need them. What a step *reads* of them is baked into its graph, so their values are part of the signature (`OuterValues`); what it
*changes* of them would change once, at capture, and never again, so that is an error (`effects`).
"""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monoflow._torch import FLAT_WEIGHTS, hook_tables, tensor_hooks
from monoflow.source import is_user_code
from monoflow.state import MODULE_TABLES, State
from monoflow.tree import PLAIN, fingerprint

_CONTAINERS = (list, dict, set, deque, bytearray)
_OPAQUE = (torch.Tensor, torch.optim.Optimizer, types.BuiltinFunctionType, types.CodeType, torch.dtype, torch.device)
_OPEN_LIBRARY_TYPES = (types.SimpleNamespace, argparse.Namespace, LRScheduler, torch.amp.GradScaler)
"""Classes of libraries whose attributes count like those of the user's own: settings, and objects that count steps."""

_UNCALLED = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__", "__dict__", "__weakref__", "__doc__")
)
"""Names in classes that a step does not call on objects that are there already."""

_MAX_DEPTH = 4
"""Levels of objects and containers that are looked into below a variable."""

_MAX_ITEMS = 64
"""Items of a container that are looked into; of larger ones only the container itself is watched."""


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A name that outlives the step: a cell of a closure, a global, an attribute of a Python module or class."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    code: types.CodeType | None


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A list, dict, set, deque or bytearray; for an object, the dict of its attributes, without those in `hidden`.

    `kind` is the class of the object, None for a container; `owned` marks modules of the step's state, which `state` follows.
    """

    name: str
    table: Any
    hidden: frozenset[str] = frozenset()
    kind: type | None = None
    owned: bool = False

    def items(self) -> Any:
        """A copy of what it holds now."""
        if isinstance(self.table, dict):
            return {key: value for key, value in self.table.items() if key not in self.hidden}
        return self.table.copy()

    def restore(self, before: Any) -> None:
        """Makes it hold what it held before."""
        if isinstance(self.table, dict):
            for key in self.items():
                if key not in before:
                    del self.table[key]
            self.table.update(before)
        else:
            self.table.clear()
            (self.table.update if isinstance(self.table, set) else self.table.extend)(before)


class Reach:
    """Walks from a step's code, from its arguments and from the modules' hooks to every Python value outside that the code names."""

    def __init__(self, step: Callable[..., Any], state: State, arguments: Iterable[Any] = ()) -> None:
        self.variables: list[Variable] = []
        self.holders: list[Holder] = []
        self.iterators: list[Variable] = []
        self.generators: list[torch.Generator] = []
        self.mentioned: set[str] = set()
        self._kinds: set[type] = set()
        self._seen = {id(swapped) for o in state.optimizers.values() for swapped in (o.state, o.param_groups, *o.param_groups)}
        self._owned = {id(m) for root in state.modules.values() for m in root.modules()}
        self._value("step", step, None, 0)
        for position, argument in enumerate(arguments):
            self._value(f"argument_{position}", argument, None, 0)
        for module in dict.fromkeys(m for root in state.modules.values() for m in root.modules()):
            self._module(module, owned=True)
        self._called_methods()

    # Code

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or not is_user_code(function.__code__.co_filename):
            return
        self._seen.add(id(function))
        code = function.__code__
        self.mentioned |= _mentioned(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._variable(name, functools.partial(_cell_value, cell), functools.partial(setattr, cell, "cell_contents"), code, 0)
        for name in _global_names(code):
            if name in function.__globals__:
                self._item(name, function.__globals__, name, code, 0)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value("default argument", default, code, 0)

    def _variable(self, name: str, read: Callable[[], Any], write: Callable[[Any], None], code: types.CodeType | None, depth: int) -> None:
        variable = Variable(name, read, write, code)
        self.variables.append(variable)
        if isinstance(read(), Iterator):
            self.iterators.append(variable)
        self._value(name, read(), code, depth)

    def _item(self, name: str, table: dict[str, Any], key: str, code: types.CodeType | None, depth: int) -> None:
        self._variable(name, functools.partial(table.get, key), functools.partial(operator.setitem, table, key), code, depth)

    # Values

    def _value(self, name: str, value: Any, code: types.CodeType | None, depth: int) -> None:
        if isinstance(value, PLAIN + _OPAQUE) or id(value) in self._seen or depth > _MAX_DEPTH:
            return
        if isinstance(value, types.FunctionType):
            self._function(value)
            self._value(name, getattr(value, "__wrapped__", None), code, depth)
        elif isinstance(value, types.MethodType):
            self._value("self", value.__self__, value.__func__.__code__ if isinstance(value.__func__, types.FunctionType) else code, depth)
            self._value(name, value.__func__, code, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._value(name, part, code, depth)
        elif isinstance(value, (tuple, *_CONTAINERS)):
            self._container(name, value, code, depth)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, nn.Module):
            if id(value) not in self._owned:
                self._module(value)
        elif isinstance(value, types.ModuleType):
            self._python_module(name, value, code, depth)
        elif isinstance(value, type):
            self._class(name, value, code, depth)
        else:
            self._object(name, value, code, depth)

    def _container(self, name: str, value: Any, code: types.CodeType | None, depth: int) -> None:
        self._seen.add(id(value))
        if not isinstance(value, tuple):
            self.holders.append(Holder(name, value))
        if len(value) <= _MAX_ITEMS:
            for child in value.values() if isinstance(value, dict) else value:
                self._value(name, child, code, depth + 1)

    def _object(self, name: str, value: Any, code: types.CodeType | None, depth: int) -> None:
        if not (is_user_class(type(value)) or isinstance(value, _OPEN_LIBRARY_TYPES)):
            return
        self._seen.add(id(value))
        self._kinds.add(type(value))
        if hasattr(value, "__dict__"):
            self.holders.append(Holder(name, vars(value), kind=type(value)))
            for attribute, child in list(vars(value).items()):
                self._value(f"{name}.{attribute}", child, code, depth + 1)
        for attribute in _slots(type(value)):
            if hasattr(value, attribute):
                read, write = functools.partial(getattr, value, attribute, None), functools.partial(setattr, value, attribute)
                self._variable(f"{name}.{attribute}", read, write, code, depth + 1)

    def _called_methods(self) -> None:
        """The methods of the objects that were reached, as far as the code names them, until no new name turns up."""
        known = 0
        while known < len(self.mentioned) + len(self._kinds):
            known = len(self.mentioned) + len(self._kinds)
            for kind in list(self._kinds):
                for owner in filter(is_user_class, kind.__mro__):
                    for name, member in list(vars(owner).items()):
                        if name in self.mentioned or name == "forward" or (name.startswith("__") and name not in _UNCALLED):
                            self._value(name, getattr(member, "fget", getattr(member, "__func__", member)), None, 1)

    def _python_module(self, name: str, value: types.ModuleType, code: types.CodeType | None, depth: int) -> None:
        if code is None or not _is_user_module(value.__name__):
            return
        for attribute in sorted(_mentioned(code) & set(vars(value))):
            self._item(f"{name}.{attribute}", vars(value), attribute, code, depth + 1)

    def _class(self, name: str, value: type, code: types.CodeType | None, depth: int) -> None:
        if not is_user_class(value) or issubclass(value, torch.autograd.Function):
            return
        self._seen.add(id(value))
        for attribute, child in list(vars(value).items()):
            if not attribute.startswith("__") and isinstance(child, PLAIN + _CONTAINERS):
                read, write = functools.partial(getattr, value, attribute, None), functools.partial(setattr, value, attribute)
                self._variable(f"{name}.{attribute}", read, write, code, depth + 1)

    def _module(self, module: nn.Module, owned: bool = False) -> None:
        """A module's plain attributes, methods and hooks; `owned` ones are walked once each."""
        if not owned:
            self._seen.add(id(module))
        kind = type(module)
        code = kind.forward.__code__ if isinstance(kind.forward, types.FunctionType) else None
        tensors = {name for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        self.holders.append(Holder(kind.__name__, vars(module), MODULE_TABLES | tensors | {FLAT_WEIGHTS}, kind, owned))
        if is_user_class(kind):
            self._kinds.add(kind)
            for attribute, value in list(vars(module).items()):
                if attribute not in MODULE_TABLES:
                    self._value(f"{kind.__name__}.{attribute}", value, code, 1)
        for table in (*hook_tables(module), *(hooks for p in module.parameters(recurse=False) for hooks in tensor_hooks(p))):
            for hook in list((table or {}).values()):
                self._value("hook", hook, None, 1)


class OuterValues:
    """The values outside that a step reads: part of the signature of its graphs. Tensors and other objects count by identity."""

    def __init__(self, step: Callable[..., Any], state: State) -> None:
        reach = Reach(step, state)
        readers = list(self._readers(reach))
        self.names = [name for name, _ in readers]
        self._reads = [read for _, read in readers]
        self._values: list[Any] = []
        self._key: tuple[Hashable, ...] = ()
        self.key()

    @staticmethod
    def _readers(reach: Reach) -> Iterator[tuple[str, Callable[[], Any]]]:
        for variable in reach.variables:
            yield variable.name, variable.read
        for holder in reach.holders:
            if isinstance(holder.table, dict):
                every = holder.kind is not None and issubclass(holder.kind, nn.Module)
                for key in holder.items() if not holder.owned else ():
                    if every or not isinstance(key, str) or key in reach.mentioned:
                        yield f"{holder.name}.{key}", functools.partial(holder.table.get, key)
            elif len(holder.table) <= _MAX_ITEMS and not isinstance(holder.table, set):
                yield holder.name, functools.partial(tuple, holder.table)

    def key(self) -> tuple[Hashable, ...]:
        """Equal for equal values; the very same object while nothing was rebound."""
        values = [read() for read in self._reads]
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values = values
            self._key = tuple(map(fingerprint, values))
        return self._key


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@functools.lru_cache(maxsize=4096)
def _mentioned(code: types.CodeType) -> frozenset[str]:
    """Every name and string in the code: what it may read of an object or dict."""
    nested = [_mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union((c for c in code.co_consts if isinstance(c, str)), *nested)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    return frozenset(names.union(*(_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))))


def is_user_class(kind: type[Any]) -> bool:
    """True for a class that is defined in the user's code."""
    return _is_user_module(kind.__module__)


@functools.lru_cache(maxsize=4096)
def _is_user_module(name: str) -> bool:
    if name == "__main__":  # a script, a notebook
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_user_code(file)


def _slots(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        slots = vars(owner).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
