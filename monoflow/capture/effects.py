"""Finds what a step changes outside of tensors: lists it appends to, counters it raises, tensors it keeps.

A graph runs none of the step's Python, so such an effect would happen once, at capture, and never again. It is an error, and what
was changed is put back.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monoflow._torch import FakeTensor, real_tensors
from monoflow.capture.outer import Holder, Reach, Variable, is_user_class
from monoflow.errors import CaptureError
from monoflow.source import Frame, OpInfo, code_frame
from monoflow.state import State
from monoflow.tree import flatten, same_value

_ONCE = "a graph runs no Python, so this would happen once and never again"
_AFTER_FIX = "do it after the call, from what the step returns; or make it a tensor (a buffer of the module), which the graph updates"


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Something outside of the step that it changed. `what` tells changes apart; `error(frames, module)` is the error for it."""

    what: Hashable
    error: Callable[[tuple[Frame, ...], str], CaptureError]


class SideEffects:
    """The Python values that a step can reach, as they were when this was made."""

    def __init__(self, step: Callable[..., Any], state: State, arguments: Iterable[Any]) -> None:
        reach = Reach(step, state, arguments)
        for iterator in reach.iterators:
            raise _iterator_error(iterator)
        self.variables = [(variable, variable.read()) for variable in reach.variables]
        self.holders = [(holder, holder.items()) for holder in reach.holders]
        self.generators = [(torch.default_generator, torch.default_generator.get_state())]
        self.generators += [(generator, generator.get_state()) for generator in reach.generators]
        self.random = random.getstate()
        self.numpy_random = _numpy_state()

    def changes(self) -> Iterator[Change]:
        """What is different now, in a way that a graph would not repeat on later calls."""
        for position, (holder, before) in enumerate(self.holders):
            now = holder.items()
            if _matters(holder, now, before):
                yield Change(("holder", position), functools.partial(_holder_error, holder, now, before))
        for position, (variable, value) in enumerate(self.variables):
            now = variable.read()
            if not same_value(now, value):
                yield Change(("variable", position), functools.partial(_variable_error, variable.name, now))
        if self._drawn():
            yield Change("random", _random_error)

    def restore(self) -> None:
        """Puts everything back."""
        for holder, before in self.holders:
            if _changed(holder.items(), before):
                holder.restore(before)
        for variable, value in self.variables:
            if not same_value(variable.read(), value):
                variable.write(value)
        for generator, state in self.generators:
            generator.set_state(state)
        random.setstate(self.random)
        if self.numpy_random is not None:
            sys.modules["numpy.random"].set_state(self.numpy_random)

    def _drawn(self) -> bool:
        if random.getstate() != self.random or not _same_numpy_state(_numpy_state(), self.numpy_random):
            return True
        with real_tensors():
            return not all(torch.equal(generator.get_state(), state) for generator, state in self.generators)


def _changed(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(key not in now or not same_value(now[key], value) for key, value in before.items())
    if isinstance(now, set):
        return bool(now != before)
    return not all(map(same_value, now, before))


def _new_values(now: Any, before: Any) -> list[tuple[Any, Any]]:
    """(key, value) of what is new in a changed container."""
    if isinstance(now, dict):
        return [(key, value) for key, value in now.items() if key not in before or not same_value(value, before[key])]
    return [(None, value) for value in now if not any(value is other for other in before)]


def _matters(holder: Holder, now: Any, before: Any) -> bool:
    """True for a change that is an error.

    Modules may switch between train and eval mode, and those of libraries keep settings; `state` follows both. Tensors, though, never.
    """
    if not _changed(now, before):
        return False
    if holder.kind is None or not issubclass(holder.kind, nn.Module):
        return True
    new = _new_values(now, before)
    if is_user_class(holder.kind):
        return not new or any(key != "training" for key, _ in new)
    return any(_holds_tensor(value) for _, value in new)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in flatten(value)[0])


# The errors


def argument_error(frames: tuple[Frame, ...], module: str) -> CaptureError:
    """The step adds to, or takes from, a list or dict that it was given."""
    return CaptureError(
        "the step changes a list or dict that is its argument: a graph runs no Python, so this would not happen",
        fix="copy it first (dict(batch)), or return the new values",
        frames=frames,
        module=module,
    )


def attribute_error(name: str, value: Any, frames: tuple[Frame, ...], module: str) -> CaptureError:
    """The step sets a Python attribute of a tensor that outlives it."""
    if _holds_tensor(value):
        return kept_error(f"attribute `{name}` of a tensor", frames, module)
    reason = f"the step sets the attribute `{name}` of a tensor: a graph runs no Python, so this would not happen"
    return CaptureError(reason, op=f"attribute `{name}`", fix="set it after the call", frames=frames, module=module)


def _holder_error(holder: Holder, now: Any, before: Any, frames: tuple[Frame, ...], module: str) -> CaptureError:
    new = _new_values(now, before)
    name, what = holder.name, type(holder.table).__name__
    if holder.kind is not None:
        key = next((key for key, _ in new), next((key for key in before if key not in now), "?"))
        name, what = f"{name}.{key}", "attribute"
    if any(_holds_tensor(value) for _, value in new):
        return kept_error(f"{what} `{name}`", frames, module)
    reason = f"the step changes `{name}`, which lives outside of it: {_ONCE}"
    return CaptureError(reason, op=f"{what} `{name}`", fix=_AFTER_FIX, frames=frames, module=module)


def _variable_error(name: str, now: Any, frames: tuple[Frame, ...], module: str) -> CaptureError:
    if _holds_tensor(now):
        return kept_error(f"variable `{name}`", frames, module)
    reason = f"the step assigns to `{name}`, a variable outside of it: {_ONCE}"
    return CaptureError(reason, op=f"assignment to `{name}`", fix=_AFTER_FIX, frames=frames, module=module)


def _random_error(frames: tuple[Frame, ...], module: str) -> CaptureError:
    return CaptureError(
        "the step draws from a random generator of Python or NumPy, or seeds one of PyTorch: the graph would use the same number forever",
        fix="draw with torch (torch.rand(()) < p, with torch.where), or outside of the step and pass the number as a tensor",
        frames=frames,
        module=module,
    )


def _iterator_error(variable: Variable) -> CaptureError:
    return CaptureError(
        f"the step uses the iterator `{variable.name}`, which lives outside of it: {_ONCE}",
        op=f"iterator `{variable.name}`",
        fix="take the item before the call, and pass it as an argument",
        frames=_first_use(variable.name, variable.code),
    )


def _first_use(name: str, code: types.CodeType | None) -> tuple[Frame, ...]:
    if code is None:
        return ()
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == name and instruction.opname.startswith("LOAD"):
            return (code_frame(code.co_filename, line, code.co_name),)
    return next(filter(None, (_first_use(name, c) for c in code.co_consts if isinstance(c, types.CodeType))), ())


def kept_error(where: str, frames: tuple[Frame, ...], module: str, op: str = "") -> CaptureError:
    """A tensor of the step is found outside of it when the step has ended."""
    return CaptureError(
        f"a tensor of the step is kept outside of it, in {where}: it has no value while the graph is captured",
        op=op or where,
        fix="return the tensor from the step, and keep what the call returns",
        module=module,
        frames=frames,
    )


def check_kept(results: list[tuple[weakref.ref[torch.Tensor], OpInfo, str]]) -> None:
    """Raises CaptureError if Python code still holds a tensor of the ended capture."""
    if all(ref() is None for ref, _, _ in results):
        return
    gc.collect()
    for ref, info, op in results:
        tensor = ref()
        if tensor is not None:
            holders = [type(h).__name__ for h in gc.get_referrers(tensor) if not isinstance(h, types.FrameType)]
            raise kept_error(f"a {holders[0]}" if holders else "native code", info.source, info.module, op)


# NumPy's generator, if NumPy is loaded


def _numpy_state() -> Any:
    module = sys.modules.get("numpy.random")
    return None if module is None else module.get_state()


def _same_numpy_state(now: Any, before: Any) -> bool:
    if before is None:  # NumPy was not loaded
        return True
    return bool(now[0] == before[0] and (now[1] == before[1]).all() and now[2:] == before[2:])
