"""`mf.graph`: owns a step's state and calls the rooms in order: capture, passes, compile, run."""

from __future__ import annotations

import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from monoflow.capture import OuterValues, StepGraph, capture, is_capturing
from monoflow.capture.graph import Captured
from monoflow.compile import choose_backend, compile_graph, compile_guards
from monoflow.errors import CompileError, CompileWarning, RecompileWarning, StepError
from monoflow.progress import Progress
from monoflow.rewrite import OnLayout, Pass, Zero, apply_passes, zero_passes
from monoflow.run import Executor, keep_freed_memory
from monoflow.state import Inventory, State
from monoflow.tree import Rebuild, arguments_key, flatten

if TYPE_CHECKING:
    from monoflow.placement import Placement
    from monoflow.sbp import LayoutLike

P = ParamSpec("P")
R = TypeVar("R")

CACHE_SIZE = 16
"""Graphs kept per step; beyond that the least recently used one is dropped."""

WARN_FROM_GRAPH = 4
"""A step that needs its fourth graph or more says what changed."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """What decides which graph a call needs, by part, so that a change can be named."""

    arguments: Hashable
    state: Hashable
    surroundings: Hashable
    variables: Hashable


class Step(Generic[P, R]):
    """A training or evaluation step that runs as a static graph. Made by `mf.graph`; called like the function it wraps.

    The first call with a new signature captures and compiles, later ones run. The signature: structure, shapes, dtypes, strides and devices
    of the arguments; train/eval modes and plain attributes of the modules; which parameters need gradients; optimizer options that are not
    numbers; outer variables that are plain values; grad mode and autocast. Floats among the arguments are inputs of the graph, other values
    that are not tensors are part of the signature.
    """

    def __init__(
        self,
        function: Callable[P, R],
        state: State,
        *,
        backend: str = "auto",
        passes: Iterable[Pass] = (),
        progress: bool = True,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.backend = choose_backend(backend)
        self._given_backend = backend
        self.passes = tuple(passes)
        self.progress = progress
        self.graphs_made = 0
        self._state = state
        self._inventory: Inventory | None = None
        self._outer: OuterValues | None = None
        self._cache: OrderedDict[_Signature, list[Executor]] = OrderedDict()
        self._last: tuple[Inventory, _Signature, Executor] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_capturing():
            return self.function(*args, **kwargs)
        leaves, structure, rebuild = flatten((args, kwargs))
        executor = self._find(leaves, structure, rebuild)
        if executor.executable is None:
            self._compile(executor)
        result: R = executor.run(leaves)
        return result

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A step defined as a method: each instance gets a step of its own, kept among its attributes as functools.cached_property does."""
        if instance is None:
            return self
        bound = self._like(types.MethodType(self.function, instance))
        vars(instance)[self._attribute] = bound
        return bound

    def _like(self, function: Callable[..., R]) -> Step[..., R]:
        """A step of the same kind and options for another function."""
        return Step(function, self._state, backend=self._given_backend, passes=self.passes, progress=self.progress)

    def graph_for(self, *args: P.args, **kwargs: P.kwargs) -> StepGraph:
        """The graph that a call with these arguments runs, after the user's passes. Compiles and runs nothing.

        `print_readable()` of it shows the user's line over each op. Raises: CaptureError.
        """
        return self._find(*flatten((args, kwargs))).captured.graph

    @property
    def is_compiled(self) -> bool:
        """True once a graph has been compiled."""
        return any(e.executable is not None for executors in self._cache.values() for e in executors)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Inside of `with train.whole_parameters():` the modules hold plain, whole parameters and buffers: to evaluate, to generate.

        Collective. What was in pieces (zero=3) is a copy: what is written into it is gone after the block. Others stay as they are.
        """
        return nullcontext()

    def stateful(self) -> dict[str, nn.Module | Optimizer]:
        """The modules and optimizers of the step: `model`, `model1`, ..., `optimizer`, ... in the order in which they were given."""
        return {**self._state.modules, **self._state.optimizers}

    # Finding the graph of a call

    def _find(self, leaves: list[Any], structure: Hashable, rebuild: Rebuild) -> Executor:
        signature, executor = self._look_up(leaves, structure)
        if executor is None:
            executor = self._make(signature, leaves, rebuild)
        return executor

    def _look_up(self, leaves: list[Any], structure: Hashable) -> tuple[_Signature, Executor | None]:
        """The signature of a call, and the graph made for it before, if there is one."""
        inventory = self._scan()
        arguments = (structure, arguments_key(leaves, inventory.names))
        surroundings = _surroundings()
        variables = self._variables()
        if self._last is not None:
            known, signature, executor = self._last
            same = known is inventory and signature.arguments == arguments and signature.surroundings == surroundings
            if same and signature.variables == variables and executor.accepts(leaves):
                return signature, executor
        signature = _Signature(arguments, inventory.key, surroundings, variables)
        for executor in self._cache.get(signature, ()):
            self._cache.move_to_end(signature)
            executor.bind(inventory)
            if executor.accepts(leaves):
                self._last = (inventory, signature, executor)
                return signature, executor
        return signature, None

    def _make(self, signature: _Signature, leaves: list[Any], rebuild: Rebuild) -> Executor:
        """Captures a graph for a call and remembers it."""
        executor = self._capture(signature, leaves, rebuild)
        inventory = self._scan()
        arguments = (signature.arguments[0], arguments_key(leaves, inventory.names))  # type: ignore[index]
        signature = _Signature(arguments, inventory.key, signature.surroundings, signature.variables)
        executor.bind(inventory)
        self._cache.setdefault(signature, []).append(executor)
        self._cache.move_to_end(signature)
        self._trim()
        self._last = (inventory, signature, executor)
        return executor

    def _variables(self) -> Hashable:
        if self._outer is None:
            self._outer = OuterValues(self.function, self._state)
        return self._outer.key()

    def _scan(self) -> Inventory:
        if self._inventory is None or not self._inventory.unchanged():
            self._inventory = self._state.scan()
        return self._inventory

    def _trim(self) -> None:
        while sum(map(len, self._cache.values())) > CACHE_SIZE:
            self._cache.popitem(last=False)

    # Making one

    def _capture(self, signature: _Signature, leaves: list[Any], rebuild: Rebuild) -> Executor:
        self.graphs_made += 1
        if self.graphs_made >= WARN_FROM_GRAPH:
            self._warn(signature)
        with Progress(self.name, self.progress) as progress:
            return self._executor(self._traced(leaves, rebuild, progress), progress)

    def _traced(self, leaves: list[Any], rebuild: Rebuild, progress: Progress) -> Captured:
        """The captured step, after the user's passes."""
        progress.room("capture")
        captured = capture(self.function, self._state, leaves, rebuild, progress.count)
        if self.passes:
            progress.room("passes")
            captured = apply_passes(captured, self.passes)
        return captured

    def _executor(self, captured: Captured, progress: Progress) -> Executor:
        """What runs a captured graph."""
        return Executor(captured, compile_guards(captured.guards))

    def _compile(self, executor: Executor) -> None:
        with Progress(self.name, self.progress) as progress:
            progress.room(f"compile ({self.backend})")
            keep_freed_memory()
            try:
                executor.executable = compile_graph(executor.graph, self.backend, progress.count)
            except CompileError as exc:
                if self._given_backend != "auto" or self.backend == "aten":
                    raise
                warnings.warn(f'step {self.name} runs on backend "aten": {exc}', CompileWarning, stacklevel=4)
                self.backend = "aten"
                executor.executable = compile_graph(executor.graph, self.backend, progress.count)

    def _warn(self, signature: _Signature) -> None:
        known = [s for s, executors in self._cache.items() if executors]
        nearest = max(known, key=lambda s: sum(_equal_parts(s, signature)), default=None)
        changed = (
            "a gradient or a number it branches on"
            if nearest is None
            else _difference(nearest, signature, self._outer.names if self._outer else [])
        )
        warnings.warn(
            f"step {self.name} is captured and compiled for the {self.graphs_made}th time; "
            f"since the nearest earlier call this changed: {changed}. "
            "Keep it fixed, or pass it as a tensor or float argument; pad batches to a few sizes.",
            RecompileWarning,
            stacklevel=6,
        )


def _surroundings() -> Hashable:
    """PyTorch's own settings that change what a step computes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _equal_parts(left: _Signature, right: _Signature) -> list[bool]:
    return [getattr(left, f.name) == getattr(right, f.name) for f in fields(_Signature)]


def _difference(before: _Signature, now: _Signature, outer: list[str]) -> str:
    for name, old, new in zip(outer, before.variables, now.variables, strict=True):  # type: ignore[call-overload]
        if old != new:
            return f"outer variable `{name}`: {old!r} -> {new!r}"
    for part in fields(_Signature):
        old, new = getattr(before, part.name), getattr(now, part.name)
        if old != new:
            return f"{part.name}: {_first_difference(old, new)}"
    return "which gradients are set on entry, or a number the step branches on"


def _first_difference(old: Any, new: Any) -> str:
    """The smallest differing parts of two nested tuples."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for left, right in zip(old, new, strict=True):
            if left != right:
                inner = _first_difference(left, right)
                label = next((v for v in old if isinstance(v, str)), "")
                return f"{label} {inner}" if label and left is not label and label not in inner else inner
    return f"{old!r} -> {new!r}"


def graph(
    *state: nn.Module | Optimizer,
    placement: Placement | None = None,
    layout: Mapping[str, LayoutLike] | None = None,
    inputs: LayoutLike | Mapping[str, LayoutLike] | None = None,
    sync: Literal["rank0", "error"] = "rank0",
    random: Literal["exact", "fast"] = "exact",
    zero: int | Zero = 0,
    backend: str = "auto",
    passes: Iterable[Pass | OnLayout] = (),
    progress: bool = True,
) -> Callable[[Callable[P, R]], Step[P, R]]:
    """Decorates a function so that all of it (forward, loss, backward, clipping, optimizer) runs as one static graph.

    Args:
        state: the modules and optimizers that the function uses. Their parameters, buffers and optimizer state are updated in place.
        placement: the ranks over which the step runs, as `mf.placement(...)`; None for one device. The result is that of one device on the
            batch of all ranks.
        layout: how parameters and buffers lie, by patterns of their names: `{"*.up.weight": ["B", "S(0)"]}`; what no pattern fits is B.
            With S the step replaces the parameter by a global tensor. Gradients and optimizer state lie like their parameter.
        inputs: how plain tensors among the arguments lie: one layout for all, or `{"mask": "B"}` by argument name. By default a rank
            passes its part of the batch: cut in dimension 0 over the first mesh dimension, tensors without dimensions B. Global tensors
            are taken as they are.
        sync: "rank0" gives all ranks the parameters, buffers and optimizer state of the first one before the first step; "error" raises
            RankError if they differ.
        random: "exact": random values (dropout) are those of one device, whatever the layout; every rank draws the whole tensor and keeps
            its piece. "fast", for large meshes: each piece is drawn by itself, equal on ranks that hold the same one.
        zero: the stage of ZeRO, by which what the ranks would hold alike is cut into pieces: 1 optimizer state, 2 gradients as well,
            3 parameters as well (they become global tensors); or `mf.Zero(stage=3, dim="dp", min_size=1024)`.
        backend: "aten" (starts in seconds, equal to eager PyTorch to the bit), "inductor" (generated C++, fastest), or
            "auto": "inductor" where C++ can be built, else "aten" (also, with a warning, for a graph that Inductor cannot compile).
        passes: functions from the captured graph to the same graph, applied in order (see docs/passes.md); those marked with
            `mf.on_layout` work on the laid-out graph.
        progress: a line on the terminal while a graph is made; never in logs.

    Outputs that are B on every mesh dimension come back as plain tensors (partial sums are reduced), others as global tensors.

    Raises: StepError for objects that are neither modules nor optimizers, for LBFGS and SparseAdam, and for unknown backends;
        on the first call CaptureError for what cannot be part of a static graph, LayoutError and SbpError for layouts that do not fit
        (nothing has been changed then); on every rank RankError where the ranks do not call the same step with parts of the same batch.

    The idea of a whole training job as one static graph over placed tensors is OneFlow's (nn.Graph, SBP).
    """
    owned = State(state)
    options = StepOptions(placement, layout or {}, inputs, sync, random, zero, backend, tuple(passes), progress)

    def decorate(function: Callable[P, R]) -> Step[P, R]:
        if not callable(function):
            raise StepError(f"mf.graph decorates a function, got {type(function).__name__}")
        return make_step(function, owned, options)

    return decorate


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What `mf.graph` takes beside the state; see there."""

    placement: Placement | None = None
    layout: Mapping[str, LayoutLike] = field(default_factory=dict)
    inputs: LayoutLike | Mapping[str, LayoutLike] | None = None
    sync: Literal["rank0", "error"] = "rank0"
    random: Literal["exact", "fast"] = "exact"
    zero: int | Zero = 0
    backend: str = "auto"
    passes: tuple[Pass | OnLayout, ...] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        """Raises StepError for options that are not known, or make no sense on one device."""
        for name, given, known in (("sync", self.sync, ("rank0", "error")), ("random", self.random, ("exact", "fast"))):
            if given not in known:
                raise StepError(f"{name}={given!r}: choose {' or '.join(map(repr, known))}")
        sharded = bool(zero_passes(self.zero))
        if self.placement is None and (self.layout or self.inputs is not None or sharded):
            raise StepError("layout=, inputs= and zero= say how tensors lie over ranks: give placement= as well")

    @property
    def graph_passes(self) -> list[Pass]:
        """Those over the captured graph."""
        return [p for p in self.passes if not isinstance(p, OnLayout)]

    @property
    def layout_passes(self) -> list[OnLayout]:
        """Those over the laid-out graph, which one device does not have: ZeRO's, then the user's."""
        return zero_passes(self.zero) + [p for p in self.passes if isinstance(p, OnLayout)]


def make_step(function: Callable[P, R], state: State, options: StepOptions) -> Step[P, R]:
    """A step on one device, or over the ranks of a placement."""
    if options.placement is None:
        return Step(function, state, backend=options.backend, passes=options.graph_passes, progress=options.progress)
    from monoflow.parallel_step import ParallelStep  # torch.distributed, which one device never needs

    return ParallelStep(function, state, options)
