"""`capture`: runs the user's step once on fake tensors and returns it as a `Captured` graph. Changes nothing of the user's."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensorMode
from monoflow.capture.calls import python_calls
from monoflow.capture.effects import Change, SideEffects, argument_error, attribute_error, check_kept
from monoflow.capture.gradients import Gradients, SupposedGradientUsed
from monoflow.capture.graph import Captured, GradientRule, Input, StepGraph, Write, is_effect
from monoflow.capture.guards import guard_module
from monoflow.capture.locate import LineTracer
from monoflow.capture.numbers import GraphFloat, GraphInt
from monoflow.capture.recorder import Recorder
from monoflow.capture.swap import Swapped, fresh_optimizer_state
from monoflow.capture.verify import verify_graph
from monoflow.errors import CaptureError
from monoflow.progress import Report, no_report
from monoflow.source import raised_at
from monoflow.state import State
from monoflow.tree import Rebuild, flatten, holds_tensors, rebuilder


def capture(step: Callable[..., Any], state: State, leaves: list[Any], rebuild: Rebuild, report: Report = no_report) -> Captured:
    """Captures `step(*args, **kwargs)`, where `rebuild(leaves)` is `(args, kwargs)`.

    Missing optimizer state is created and kept; nothing else of the user's objects changes, and a failed capture changes nothing.

    Raises: CaptureError for what cannot be part of a static graph; the user's own exceptions pass through.
    """
    effects = SideEffects(step, state, leaves)
    attempt = functools.partial(_Attempt, step, state, leaves, rebuild, report)
    with fresh_optimizer_state(state) as created:
        try:
            captured = attempt().run(effects, suppose=True)
        except SupposedGradientUsed:
            captured = attempt().run(effects, suppose=False)
        except _Changed as changed:
            effects.restore()
            error = attempt().locate(effects, changed.change)
            effects.restore()
            raise error from None
        except BaseException:
            effects.restore()
            raise
        created -= _used_state(captured, state)
    return captured


def _used_state(captured: Captured, state: State) -> set[tuple[int, Any]]:
    """(id(optimizer), parameter) of the optimizer state that the graph uses."""
    names = {i.name for i in captured.inputs if i.kind == "optimizer"}
    used = {id(entry.tensor) for entry in state.scan().tensors if entry.kind == "optimizer" and entry.name in names}
    return {
        (id(o), p)
        for o in state.optimizers.values()
        for p, values in o.state.items()
        if any(id(value) in used for value in values.values())
    }


class _Changed(Exception):
    """The step changes something outside of it."""

    def __init__(self, change: Change) -> None:
        self.change = change


class _Active(threading.local):
    on = False


_active = _Active()


def is_capturing() -> bool:
    """True while a step is being captured in this thread: another step that it calls is then part of it."""
    return _active.on


_TRACING = tuple(os.path.join(os.path.dirname(torch.__file__), part, "") for part in ("_subclasses", "fx", "nested"))
"""Parts of PyTorch whose errors while a step is captured are about tracing, not about the step."""

_HOLE = object()
"""Where a value of the graph goes in a result; other leaves of it are the same on every call."""


class _Attempt:
    """One run of the step under capture."""

    def __init__(self, step: Callable[..., Any], state: State, leaves: list[Any], rebuild: Rebuild, report: Report) -> None:
        self.step = step
        self.state = state
        self.leaves = leaves
        self.rebuild = rebuild
        self.inventory = state.scan()
        self.fake_mode = FakeTensorMode()
        self.recorder = Recorder(self.fake_mode, report)

    def run(self, effects: SideEffects, suppose: bool) -> Captured:
        """The captured step. Raises CaptureError, SupposedGradientUsed, _Changed, or what the step raises."""
        recorder = self.recorder
        with self._prepared(suppose) as (args, kwargs, swapped, gradients):
            given = flatten((args, kwargs))[:2]
            result = self._call(args, kwargs)
            if recorder.origins.refused is not None:
                raise recorder.origins.refused  # the step has caught it
            for change in self._changes(effects, given, (args, kwargs)):
                raise _Changed(change)
            returned, rebuild = self._returned(result)
            rebound = list(swapped.writes())
            rules, gradient_writes = gradients.results()
        writes = rebound + gradient_writes
        recorder.graph.output(tuple(returned) + tuple(node for _, node in writes))
        results = recorder.results
        del args, kwargs, given, result, swapped, gradients
        recorder.forget_tensors()
        check_kept(results)
        return self._captured(rebuild, len(returned), tuple(write for write, _ in writes), rules)

    def locate(self, effects: SideEffects, change: Change) -> CaptureError:
        """The error for a change, with the line at which it happens: found by running the step once more."""
        with contextlib.suppress(Exception), self._prepared(suppose=False) as (args, kwargs, _, _):
            given = flatten((args, kwargs))[:2]

            def look() -> Change | None:
                return next((c for c in self._changes(effects, given, (args, kwargs)) if c.what == change.what), None)

            with LineTracer(self.recorder.origins, look) as tracer:
                self._call(args, kwargs)
            if tracer.found is not None:
                found, frames, module = tracer.found
                return found.error(frames, module)
        return change.error((), "")

    def _changes(self, effects: SideEffects, given: tuple[list[Any], Any], arguments: Any) -> Iterator[Change]:
        """What the step changed of Python outside, of its argument's lists and dicts, and of tensors' attributes."""
        yield from effects.changes()
        leaves, structure, _ = flatten(arguments)
        if structure != given[1] or not all(map(operator.is_, leaves, given[0])):
            yield Change("arguments", argument_error)
        for name, fake, attributes in self.recorder.attributes:
            for key, value in vars(fake).items():
                if key not in attributes:
                    yield Change((name, key), functools.partial(attribute_error, f"{name}.{key}", value))

    @contextlib.contextmanager
    def _prepared(self, suppose: bool) -> Iterator[tuple[Any, Any, Swapped, Gradients]]:
        """Everything is in place for the step to be called; put back after."""
        recorder = self.recorder
        gradients = Gradients(recorder, suppose)
        swapped = Swapped(self.state, self.inventory, recorder)
        self._state_inputs(swapped, gradients)
        args, kwargs = self.rebuild(self._arguments(gradients))
        _active.on = True
        try:
            with swapped.active(), python_calls(recorder, gradients, self.state.module_paths()), self.fake_mode, recorder:
                yield args, kwargs, swapped, gradients
        finally:
            _active.on = False
            torch.clear_autocast_cache()

    def _call(self, args: Any, kwargs: Any) -> Any:
        self.recorder.origins.boundary = sys._getframe()
        try:
            return self.step(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as exc:
            if self.recorder.origins.refused is not None:
                raise self.recorder.origins.refused from exc
            failed = self.recorder.failed
            if failed is not None and failed[0] is exc:
                raise failed[1] from exc
            frames = raised_at(exc, self.recorder.origins.boundary)
            if frames and frames[0].file.startswith(_TRACING):
                raise CaptureError(
                    f"PyTorch cannot trace this: {type(exc).__name__}: {exc}", module=self.recorder.origins.module, frames=frames
                ) from exc
            raise

    # Inputs

    def _state_inputs(self, swapped: Swapped, gradients: Gradients) -> None:
        for entry in self.inventory.tensors:
            if not entry.tensor.is_leaf:  # what a module computed from its parameters before and will compute again (weight_norm)
                continue
            fake = self.recorder.tensor_input(Input(entry.name, entry.kind), entry.tensor)
            if entry.kind == "optimizer":  # a count of steps, from which numbers are computed
                self.recorder.known.tensor(self.recorder.value_node(fake), entry.tensor)
        for entry in self.inventory.tensors:
            if entry.kind == "parameter" and entry.tensor.is_leaf:
                gradients.add(self._twin(entry.tensor), entry.tensor, entry.name)
        for number in self.inventory.numbers:
            traced = self.recorder.number_input(Input(number.name, "number"), number.read())
            swapped.number(number.place, traced)

    def _twin(self, real: torch.Tensor) -> torch.Tensor:
        twin = self.recorder.twin_of(real)
        assert twin is not None
        return twin

    def _arguments(self, gradients: Gradients) -> list[Any]:
        traced: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                traced.append(self._tensor_argument(index, leaf, gradients))
            elif isinstance(leaf, float):
                traced.append(self.recorder.number_input(Input(f"argument_{index}", "number", index=index), leaf))
            else:
                self._check_argument(index, leaf)
                traced.append(leaf)
        return traced

    @staticmethod
    def _check_argument(index: int, leaf: Any) -> None:
        if holds_tensors(leaf):
            raise CaptureError(
                f"argument {index} of the step is a {type(leaf).__name__} with tensors in it, which a graph cannot find on later calls",
                fix="pass the tensors themselves, or in a list, tuple, dict or dataclass",
            )

    def _tensor_argument(self, index: int, real: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        known = self.recorder.twin_of(real)
        if known is not None:
            return known
        if real.requires_grad and not real.is_leaf:
            raise CaptureError(
                f"argument {index} of the step (shape {tuple(real.shape)}) carries autograd history from outside of the step",
                fix="pass tensor.detach(), or compute it inside the step",
            )
        fake = self.recorder.tensor_input(Input(f"argument_{index}", "argument", index=index), real)
        if real.requires_grad:
            gradients.add(fake, real, argument=index)
        return fake

    # Outputs

    def _returned(self, result: Any) -> tuple[list[fx.Node], Rebuild]:
        """The nodes of what the step returns, and how to make its result of their values."""
        nodes: list[fx.Node] = []
        fixed: list[Any] = []
        for value in flatten(result, objects=True)[0]:
            if isinstance(value, torch.Tensor):
                nodes.append(self.recorder.value_node(value))
            elif isinstance(value, GraphFloat | GraphInt):
                nodes.append(value.node.fx_node)
            else:
                fixed.append(value)
                continue
            fixed.append(_HOLE)
        build = rebuilder(result, objects=True)

        def rebuild(values: list[Any]) -> Any:
            filling = iter(values)
            return build([next(filling) if value is _HOLE else value for value in fixed])

        return nodes, rebuild

    def _captured(self, rebuild: Rebuild, count: int, writes: tuple[Write, ...], rules: tuple[GradientRule, ...]) -> Captured:
        recorder = self.recorder
        graph = recorder.graph
        guards = guard_module(graph, recorder.known)  # first: what only guards need is dead code in the graph
        graph.eliminate_dead_code(is_effect)
        inputs = _drop_unused(graph, guards, recorder.inputs)
        step_graph = StepGraph(torch.nn.Module(), graph)
        captured = Captured(step_graph, inputs, rebuild, count, writes, rules, guards)
        verify_graph(captured, "capture")
        return captured


def _drop_unused(graph: fx.Graph, guards: fx.GraphModule | None, inputs: list[Input]) -> tuple[Input, ...]:
    """Removes placeholders that neither the graph nor its guards read; returns the inputs that stay."""
    in_graph = graph.find_nodes(op="placeholder")
    in_guards = guards.graph.find_nodes(op="placeholder") if guards is not None else [None] * len(in_graph)
    kept: list[Input] = []
    for node, twin, source in zip(in_graph, in_guards, inputs, strict=True):
        if node.users or (twin is not None and twin.users):
            kept.append(source)
            continue
        graph.erase_node(node)
        if guards is not None and twin is not None:
            guards.graph.erase_node(twin)
    if guards is not None:
        guards.recompile()
    return tuple(kept)
