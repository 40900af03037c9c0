"""Finds what a step changes outside of tensors: lists it appends to, counters it raises, tensors it keeps.

A graph runs none of the step's Python, so such an effect would happen once, at capture, and never again. It is an error, and what
was changed is put back.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monoflow._torch import FakeTensor, hook_tables
from monoflow.errors import CaptureError
from monoflow.source import Frame, OpInfo, code_frame, is_user_code
from monoflow.state import State

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque, bytearray)
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """A container outside the step, and a copy of what it held."""

    name: str
    container: Any
    before: Any
    code: types.CodeType | None

    def changed(self) -> bool:
        now = self.container
        if len(now) != len(self.before):
            return True
        if isinstance(now, dict):
            return any(key not in now or not _same(now[key], value) for key, value in self.before.items())
        if isinstance(now, set):
            return now != self.before
        return not all(map(_same, now, self.before))

    def restore(self) -> None:
        self.container.clear()
        (self.container.update if isinstance(self.container, dict | set) else self.container.extend)(self.before)


def _same(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, _PLAIN) and type(left) is type(right) and left == right)


class SideEffects:
    """Python state that a step function, its helpers and its modules' hooks can reach, as it was when this was made."""

    def __init__(self, step: Callable[..., Any], state: State) -> None:
        self.watched: list[_Watched] = []
        self.variables: list[tuple[str, Callable[[], Any], Callable[[Any], None], Any, types.CodeType]] = []
        self.random = random.getstate()
        self.numpy_random = _numpy_state()
        self._seen: set[int] = set()
        owned = {id(m) for root in state.modules.values() for m in root.modules()}
        self._seen |= owned | {id(o) for o in state.optimizers.values()}
        self._function(step, 0)
        for root in state.modules.values():
            for module in root.modules():
                self._module(module)

    # Collecting

    def _function(self, function: Any, depth: int) -> None:
        if isinstance(function, types.MethodType):
            self._value("self", function.__self__, function.__func__.__code__, depth)
            function = function.__func__
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType) or id(function) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(function))
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(name, cell, code)
            self._value(name, _cell_value(cell), code, depth)
        for name in _global_names(code):
            if name in function.__globals__:
                self._global(name, function.__globals__, code)
                self._value(name, function.__globals__[name], code, depth)

    def _cell(self, name: str, cell: types.CellType, code: types.CodeType) -> None:
        value = _cell_value(cell)
        if isinstance(value, _PLAIN):
            self.variables.append((name, lambda: _cell_value(cell), lambda v: setattr(cell, "cell_contents", v), value, code))

    def _global(self, name: str, table: dict[str, Any], code: types.CodeType) -> None:
        value = table[name]
        if isinstance(value, _PLAIN):
            self.variables.append((name, lambda: table.get(name), lambda v: table.__setitem__(name, v), value, code))

    def _value(self, name: str, value: Any, code: types.CodeType | None, depth: int) -> None:
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            source = getattr(value, "__func__", value)
            if is_user_code(source.__code__.co_filename):
                self._function(value, depth + 1)
        elif isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            self.watched.append(_Watched(name, value, value.copy(), code))
            children = value.values() if isinstance(value, dict) else value
            if len(value) <= 64:
                for child in children:
                    self._value(name, child, code, depth + 1)
        elif isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer | type | types.ModuleType):
            return
        elif hasattr(value, "__dict__") and is_user_code(_class_file(type(value))):
            self._seen.add(id(value))
            self.watched.append(_Watched(name, vars(value), dict(vars(value)), code))
            for attribute, child in list(vars(value).items()):
                self._value(f"{name}.{attribute}", child, code, depth + 1)

    def _module(self, module: nn.Module) -> None:
        if is_user_code(_class_file(type(module))):
            code = type(module).forward.__code__ if isinstance(type(module).forward, types.FunctionType) else None
            public = _PublicAttributes(module)
            self.watched.append(_Watched(f"{type(module).__name__}", public, public.copy(), code))
            for attribute, value in public.copy().items():
                self._value(f"{type(module).__name__}.{attribute}", value, code, 1)
        for table in hook_tables(module):
            for hook in table.values():
                self._function(hook, 1)

    # Judging

    def check(self) -> None:
        """Raises CaptureError, with everything put back, if the step changed any of it."""
        found = next(self._changes(), None)
        if found is None:
            return
        error = found()
        self.restore()
        raise error

    def _changes(self) -> Iterator[Callable[[], CaptureError]]:
        for watched in self.watched:
            if watched.changed():
                yield lambda w=watched: self._container_error(w)
        for name, read, _, before, code in self.variables:
            if not _same(read(), before):
                yield lambda n=name, c=code: self._variable_error(n, c)
        if random.getstate() != self.random or _numpy_state() != self.numpy_random:
            yield self._random_error

    def restore(self) -> None:
        for watched in self.watched:
            if watched.changed():
                watched.restore()
        for _, read, write, before, _ in self.variables:
            if not _same(read(), before):
                write(before)
        random.setstate(self.random)
        if self.numpy_random is not None:
            import numpy as np

            np.random.set_state(_as_numpy_state(self.numpy_random))

    def _container_error(self, watched: _Watched) -> CaptureError:
        values = watched.container.values() if isinstance(watched.container, dict) else watched.container
        name = watched.name
        if isinstance(watched.container, _PublicAttributes):
            name += "." + next((k for k, v in watched.container.items() if k not in watched.before or not _same(v, watched.before[k])), "?")
        frames = _lines_naming(name.split(".")[-1] if "." in name else name, watched.code)
        if any(isinstance(v, FakeTensor) for v in values):
            return CaptureError(
                f"a tensor of the step is kept outside of it, in `{name}`: it has no value while the graph is captured",
                op=f"{type(watched.container).__name__} `{name}`",
                fix=f"return the tensor from the step, and append it to `{name}` after the call",
                frames=frames,
            )
        return CaptureError(
            f"the step changes `{name}`, which lives outside of it: a graph runs no Python, so this would happen once and never again",
            op=f"{type(watched.container).__name__} `{name}`",
            fix="do it after the call, from what the step returns; or make it a tensor (a buffer of the module), which the graph updates",
            frames=frames,
        )

    def _variable_error(self, name: str, code: types.CodeType) -> CaptureError:
        return CaptureError(
            f"the step assigns to `{name}`, a variable outside of it: a graph runs no Python, so this would happen once and never again",
            op=f"assignment to `{name}`",
            fix="do it after the call; or make it a tensor (a buffer of the module), which the graph updates",
            frames=_lines_naming(name, code),
        )

    def _random_error(self) -> CaptureError:
        return CaptureError(
            "the step draws from Python's or NumPy's random generator: the graph would use the same number forever",
            fix="draw with torch (torch.rand(()) < p, with torch.where), or outside of the step and pass the number as a tensor",
        )


class _PublicAttributes(dict[str, Any]):
    """View of a module's own plain attributes; writing goes to the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def _now(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.module).items() if not (k.startswith("_") or k == "training")}

    def copy(self) -> dict[str, Any]:
        return self._now()

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def items(self) -> Any:
        return self._now().items()

    def values(self) -> Any:
        return self._now().values()

    def clear(self) -> None:
        for key in self._now():
            del vars(self.module)[key]

    def update(self, values: dict[str, Any]) -> None:  # type: ignore[override]
        vars(self.module).update(values)


def outer_variables(step: Callable[..., Any]) -> list[tuple[str, Callable[[], Any]]]:
    """(name, reader) of the plain variables outside the step that it or its helpers read: their values are baked into a graph."""
    return [(name, read) for name, read, *_ in SideEffects(step, State([])).variables]


def check_kept(results: list[tuple[weakref.ref[torch.Tensor], OpInfo, str]]) -> None:
    """Raises CaptureError if Python code still holds a tensor of the ended capture."""
    if not any(ref() is not None for ref, _, _ in results):
        return
    gc.collect()
    for ref, info, op in results:
        tensor = ref()
        if tensor is None:
            continue
        holders = [h for h in gc.get_referrers(tensor) if isinstance(h, list | dict | set | deque | tuple) and h is not results]
        holders = [h for h in holders if not _is_frame_table(h)]
        if holders:
            raise CaptureError(
                f"a tensor of the step is kept outside of it, in a {type(holders[0]).__name__}: it has no value while the graph is captured",
                op=op,
                fix="return the tensor from the step, and keep what the call returns",
                module=info.module,
                frames=info.source,
            )


def _is_frame_table(holder: Any) -> bool:
    return isinstance(holder, dict) and ("_monoflow_node" in holder or holder is sys.modules)


def _cell_value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _global_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _lines_naming(name: str, code: types.CodeType | None) -> tuple[Frame, ...]:
    """The line of `code` that stores to `name`, or else the last that reads it."""
    if code is None:
        return ()
    line = best = code.co_firstlineno
    stored = False
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == name and not stored:
            best, stored = line, instruction.opname.startswith("STORE")
    return (code_frame(code.co_filename, best, code.co_name),)


def _class_file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or f"<{kind.__module__}>"


def _numpy_state() -> Any:
    np = sys.modules.get("numpy")
    if np is None:
        return None
    name, keys, *rest = np.random.get_state()
    return (name, keys.tobytes(), *rest)


def _as_numpy_state(state: Any) -> Any:
    import numpy as np

    name, keys, *rest = state
    return (name, np.frombuffer(keys, dtype=np.uint32), *rest)
