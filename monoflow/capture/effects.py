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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from monoflow._torch import FakeTensor
from monoflow.capture.outer import Holder, Reach, Variable, is_user_class
from monoflow.errors import CaptureError
from monoflow.source import Frame, OpInfo, code_frame
from monoflow.state import State
from monoflow.tree import PLAIN

_ONCE = "a graph runs no Python, so this would happen once and never again"
_AFTER_FIX = "do it after the call, from what the step returns; or make it a tensor (a buffer of the module), which the graph updates"


class SideEffects:
    """The Python values that a step can reach, as they were when this was made."""

    def __init__(self, step: Callable[..., Any], state: State) -> None:
        reach = Reach(step, state)
        self.variables = [(variable, variable.read()) for variable in reach.variables]
        self.holders = [(holder, holder.items()) for holder in reach.holders]
        self.random = random.getstate()
        self.numpy_random = _numpy_state()

    def check(self) -> None:
        """Raises CaptureError, with everything put back, if the step changed any of it."""
        error = next(self._errors(), None)
        if error is not None:
            self.restore()
            raise error

    def restore(self) -> None:
        """Puts everything back."""
        for holder, before in self.holders:
            if _changed(holder.items(), before):
                holder.restore(before)
        for variable, value in self.variables:
            if not _same(variable.read(), value):
                variable.write(value)
        random.setstate(self.random)
        if self.numpy_random is not None:
            sys.modules["numpy.random"].set_state(self.numpy_random)

    def _errors(self) -> Iterator[CaptureError]:
        for holder, before in self.holders:
            now = holder.items()
            if _changed(now, before) and _matters(holder, now, before):
                yield _holder_error(holder, now, before)
        for variable, value in self.variables:
            if not _same(variable.read(), value):
                yield _variable_error(variable)
        if random.getstate() != self.random or not _same_numpy_state(_numpy_state(), self.numpy_random):
            yield CaptureError(
                "the step draws from Python's or NumPy's random generator: the graph would use the same number forever",
                fix="draw with torch (torch.rand(()) < p, with torch.where), or outside of the step and pass the number as a tensor",
            )


def _same(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, PLAIN) and type(left) is type(right) and bool(left == right))


def _changed(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(key not in now or not _same(now[key], value) for key, value in before.items())
    if isinstance(now, set):
        return bool(now != before)
    return not all(map(_same, now, before))


def _new_values(now: Any, before: Any) -> list[tuple[Any, Any]]:
    """(key, value) of what is new in a changed container."""
    if isinstance(now, dict):
        return [(key, value) for key, value in now.items() if key not in before or not _same(value, before[key])]
    return [(None, value) for value in now if not any(value is other for other in before)]


def _matters(holder: Holder, now: Any, before: Any) -> bool:
    """Modules may switch between train and eval mode, and those of libraries keep settings; `state` follows both. No tensors, though."""
    if holder.kind is None or not issubclass(holder.kind, nn.Module):
        return True
    new = _new_values(now, before)
    if is_user_class(holder.kind):
        return not new or any(key != "training" for key, _ in new)
    return any(isinstance(value, FakeTensor) for _, value in new)


# The errors


def _holder_error(holder: Holder, now: Any, before: Any) -> CaptureError:
    new = _new_values(now, before)
    name = holder.name
    if holder.kind is not None:
        name += "." + next((str(key) for key, _ in new), next((str(key) for key in before if key not in now), "?"))
    what = "attribute" if holder.kind is not None else type(holder.table).__name__
    frames = _line_naming(name.split(".")[-1], holder.code)
    if any(isinstance(value, FakeTensor) for _, value in new):
        return kept_error(f"{what} `{name}`", frames=frames)
    return CaptureError(
        f"the step changes `{name}`, which lives outside of it: {_ONCE}", op=f"{what} `{name}`", fix=_AFTER_FIX, frames=frames
    )


def _variable_error(variable: Variable) -> CaptureError:
    frames = _line_naming(variable.name.split(".")[-1], variable.code)
    if isinstance(variable.read(), FakeTensor):
        return kept_error(f"variable `{variable.name}`", frames=frames)
    return CaptureError(
        f"the step assigns to `{variable.name}`, a variable outside of it: {_ONCE}",
        op=f"assignment to `{variable.name}`",
        fix=_AFTER_FIX,
        frames=frames,
    )


def kept_error(where: str, *, op: str = "", module: str = "", frames: tuple[Frame, ...] = ()) -> CaptureError:
    """A tensor of the step is found outside of it when the step has ended."""
    return CaptureError(
        f"a tensor of the step is kept outside of it, in {where}: it has no value while the graph is captured",
        op=op or where,
        fix="return the tensor from the step, and keep what the call returns",
        module=module,
        frames=frames,
    )


def _line_naming(name: str, code: types.CodeType | None) -> tuple[Frame, ...]:
    """The line of `code`, or of a function inside it, that stores to `name`, or else the last that reads it."""
    found = _find_line(name, code) if code is not None else None
    return () if found is None else (code_frame(found[1].co_filename, found[0], found[1].co_name),)


def _find_line(name: str, code: types.CodeType) -> tuple[int, types.CodeType, bool] | None:
    """(line, code, whether it is a store)."""
    found: tuple[int, types.CodeType, bool] | None = None
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == name and not (found and found[2]):
            found = (line, code, instruction.opname.startswith(("STORE", "DELETE")))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _find_line(name, constant)
            if inner is not None and (found is None or (inner[2] and not found[2])):
                found = inner
    return found


def check_kept(results: list[tuple[weakref.ref[torch.Tensor], OpInfo, str]]) -> None:
    """Raises CaptureError if Python code still holds a tensor of the ended capture."""
    if all(ref() is None for ref, _, _ in results):
        return
    gc.collect()
    for ref, info, op in results:
        tensor = ref()
        if tensor is not None:
            holders = [type(h).__name__ for h in gc.get_referrers(tensor) if not isinstance(h, types.FrameType)]
            raise kept_error(f"a {holders[0]}" if holders else "native code", op=op, module=info.module, frames=info.source)


# NumPy's generator, if NumPy is loaded


def _numpy_state() -> Any:
    module = sys.modules.get("numpy.random")
    return None if module is None else module.get_state()


def _same_numpy_state(now: Any, before: Any) -> bool:
    if before is None:  # NumPy was not loaded
        return True
    return bool(now[0] == before[0] and (now[1] == before[1]).all() and now[2:] == before[2:])
