"""`capture`: runs the user's step once on fake tensors and returns it as a `Captured` graph. Changes nothing of the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensorMode
from monoflow.capture.calls import Gradients, python_calls
from monoflow.capture.effects import SideEffects, check_kept
from monoflow.capture.graph import Captured, GradientRule, Input, StepGraph, Write, is_effect
from monoflow.capture.guards import guard_module
from monoflow.capture.numbers import GraphFloat, GraphInt
from monoflow.capture.recorder import Recorder, Report, no_report
from monoflow.capture.swap import Swapped, fresh_optimizer_state
from monoflow.capture.verify import verify_graph
from monoflow.errors import CaptureError
from monoflow.state import State, TensorEntry
from monoflow.tree import Rebuild, flatten


def capture(step: Callable[..., Any], state: State, leaves: list[Any], rebuild: Rebuild, report: Report = no_report) -> Captured:
    """Captures `step(*args, **kwargs)`, where `rebuild(leaves)` is `(args, kwargs)`.

    Missing optimizer state is created and kept; nothing else of the user's objects changes, and a failed capture changes nothing.

    Raises: CaptureError for what cannot be part of a static graph; the user's own exceptions pass through.
    """
    effects = SideEffects(step, state)
    random_state = torch.get_rng_state()
    try:
        with fresh_optimizer_state(state) as created:
            try:
                captured = _Attempt(step, state, leaves, rebuild, report).run(effects, suppose=True)
            except _SupposedGradientUsed:
                captured = _Attempt(step, state, leaves, rebuild, report).run(effects, suppose=False)
            used = {id(i.entry.tensor) for i in captured.inputs if i.kind == "optimizer" and i.entry is not None}
            created -= {
                (id(o), p) for o in state.optimizers.values() for p, values in o.state.items() if any(id(v) in used for v in values.values())
            }
    finally:
        torch.set_rng_state(random_state)
    return captured


class _SupposedGradientUsed(Exception):
    """The step read a gradient that was only supposed; capture again without."""


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
        self.twins: list[tuple[torch.Tensor, TensorEntry, int]] = []

    def run(self, effects: SideEffects, suppose: bool) -> Captured:
        recorder = self.recorder
        gradients = Gradients(recorder, suppose)
        swapped = Swapped(self.state, self.inventory, recorder)
        self._state_inputs(swapped, gradients)
        args, kwargs = self.rebuild(self._arguments(gradients))
        try:
            with swapped.active(), python_calls(recorder, gradients, self.state.module_paths()), self.fake_mode, recorder:
                result = self._call(args, kwargs)
                outputs, _, rebuild = flatten(result)
                returned = [self._output(value) for value in outputs]
                rebound = list(swapped.writes())
        except Exception:
            effects.restore()
            raise
        effects.check()
        rules, gradient_writes = self._gradients(gradients)
        writes = rebound + gradient_writes
        recorder.graph.output(tuple(returned) + tuple(node for _, node in writes))
        results = recorder.results
        del args, kwargs, result, outputs, swapped, gradients
        self.twins.clear()
        recorder.forget_tensors()
        check_kept(results)
        return self._captured(rebuild, len(returned), tuple(write for write, _ in writes), rules)

    def _call(self, args: Any, kwargs: Any) -> Any:
        self.recorder.boundary = sys._getframe()
        try:
            return self.step(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as exc:
            failed = self.recorder.failed
            if failed is not None and failed[0] is exc:
                raise failed[1] from exc
            raise

    # Inputs

    def _state_inputs(self, swapped: Swapped, gradients: Gradients) -> None:
        for entry in self.inventory.tensors:
            fake = self.recorder.tensor_input(Input(entry.name, entry.kind, entry=entry), entry.tensor)
            fake.grad = None
            if entry.kind == "optimizer":
                if entry.tensor.numel() == 1 and entry.tensor.device.type == "cpu":
                    self.recorder.host_tensor(fake, entry.tensor)
            elif entry.kind == "parameter":
                self.twins.append((fake, entry, -1))
        for fake, entry, argument in self.twins:
            gradients.add(fake, entry, argument)
        for number in self.inventory.numbers:
            traced = self.recorder.number_input(Input(number.name, "number", number=number), number.read())
            swapped.number(number.place.container, number.place.key, number.place.index, traced)

    def _arguments(self, gradients: Gradients) -> list[Any]:
        traced: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                traced.append(self._tensor_argument(index, leaf, gradients))
            elif isinstance(leaf, float):
                traced.append(self.recorder.number_input(Input(f"argument_{index}", "number", index=index), leaf))
            else:
                traced.append(leaf)
        return traced

    def _tensor_argument(self, index: int, real: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        known = self.recorder.fake_of(real)
        if known is not None:
            return known
        if real.requires_grad and not real.is_leaf:
            raise CaptureError(
                f"argument {index} of the step (shape {tuple(real.shape)}) carries autograd history from outside of the step",
                fix="pass tensor.detach(), or compute it inside the step",
            )
        entry = TensorEntry(f"argument_{index}", "parameter", real, ())
        fake = self.recorder.tensor_input(Input(entry.name, "argument", index=index), real)
        fake.grad = None
        if real.requires_grad:
            self.twins.append((fake, entry, index))
            gradients.add(fake, entry, index)
        return fake

    # Outputs

    def _output(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.recorder.value_node(value)
        if isinstance(value, GraphFloat | GraphInt):
            return value.node.fx_node
        return value

    def _gradients(self, gradients: Gradients) -> tuple[tuple[GradientRule, ...], list[tuple[Write, fx.Node]]]:
        """How each parameter's `.grad` must be on entry, and what the step leaves in it."""
        rules: list[GradientRule] = []
        writes: list[tuple[Write, fx.Node]] = []
        for fake, entry, argument in self.twins:
            final = fake.grad
            entered = gradients.on_entry.get(id(fake))
            placeholder = None if entered is None else gradients.placeholders[id(fake)]
            read = placeholder is not None and bool(placeholder.users)
            if id(fake) in gradients.supposed and (read or final is entered):
                raise _SupposedGradientUsed
            if placeholder is not None:
                on_entry = "tensor" if read else "any"
            else:
                on_entry = "none" if final is not None else "any"
            if final is not None and final is not entered:
                node = self.recorder.value_node(final)
                store = _gradient_store(entry.tensor) if argument < 0 else None
                writes.append((Write(f"{entry.name}.grad", "gradient", store, argument), node))
            rules.append(GradientRule(entry, argument, on_entry, cleared=final is None and entered is not None))
        return tuple(rules), writes

    def _captured(self, rebuild: Rebuild, count: int, writes: tuple[Write, ...], rules: tuple[GradientRule, ...]) -> Captured:
        recorder = self.recorder
        graph = recorder.graph
        graph.eliminate_dead_code(is_effect)
        guards = guard_module(recorder)
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


def _gradient_store(tensor: torch.Tensor) -> Callable[[Any], None]:
    def store(value: torch.Tensor | None) -> None:
        tensor.grad = value

    return store
