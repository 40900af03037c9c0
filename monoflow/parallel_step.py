"""A step over several ranks: before it runs, the ranks agree that they all run the same graph."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import fx, nn

from monoflow.agreement import fingerprint64, stable_text
from monoflow.capture import is_capturing
from monoflow.capture.graph import Captured, StepGraph, describe_node
from monoflow.compile import prepared_graph
from monoflow.errors import RankError, StepError
from monoflow.explain.memory import predict_memory
from monoflow.explain.plan import Plan, PlannedCollective, PlannedTensor
from monoflow.layout.functionalize import functionalize
from monoflow.layout.lay_out import LaidOut
from monoflow.lower.traffic import collectives_of
from monoflow.parallel import Call, Parallel
from monoflow.progress import Progress
from monoflow.run import Executor
from monoflow.run.track import MemoryTracker
from monoflow.sbp import format_layout
from monoflow.state import Inventory, State
from monoflow.step import Step, StepOptions, _surroundings
from monoflow.tree import Rebuild, arguments_key, flatten, leaf_names
from monoflow.whole import whole_state

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _Known:
    """A graph, what the ranks had agreed on for the call for which it was found, and the signatures of all of them then."""

    executor: Executor
    serial: int
    call: Call
    marks: tuple[int, ...]


class ParallelStep(Step[P, R]):
    """A `Step` whose tensors lie over the ranks of a placement."""

    def __init__(
        self,
        function: Callable[P, R],
        state: State,
        options: StepOptions,
    ) -> None:
        super().__init__(function, state, backend=options.backend, passes=options.graph_passes, progress=options.progress)
        self._parallel = Parallel(options)
        self._known: dict[Hashable, _Known] = {}
        self._serials: dict[Executor, int] = {}
        self._laid: dict[Executor, LaidOut] = {}
        self._call: Call | None = None
        self._marks: dict[Hashable, int] = {}
        self._marked: tuple[Inventory, int] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_capturing():
            return self.function(*args, **kwargs)
        leaves, structure, rebuild = flatten((args, kwargs))
        known = self._agreed(leaves, structure, rebuild, args, kwargs)
        executor = known.executor
        if executor.executable is None:
            with self._parallel.together():
                self._compile(executor)
        for index in known.call.recut:
            leaves[index] = self._parallel.recut(leaves[index], known.call.layouts[index])
        with self._parallel.randomness(executor):
            result: R = executor.run(leaves)
        return result

    def _like(self, function: Callable[..., R]) -> ParallelStep[..., R]:
        return ParallelStep(function, self._state, self._parallel.options)

    def laid_out(self, *args: P.args, **kwargs: P.kwargs) -> LaidOut:
        """The laid-out graph that a call with these arguments runs. Collective. Raises what a call would raise before it runs."""
        leaves, structure, rebuild = flatten((args, kwargs))
        return self._laid[self._agreed(leaves, structure, rebuild, args, kwargs).executor]

    def graph_for(self, *args: P.args, **kwargs: P.kwargs) -> StepGraph:
        """The laid-out graph over whole tensors that a call with these arguments runs. Collective; compiles and runs nothing.

        `print_readable()` of it shows the user's line over each op, and how each value lies. Raises what a call would raise before it runs.
        """
        return self.laid_out(*args, **kwargs).captured.graph

    def rank_graph_for(self, *args: P.args, **kwargs: P.kwargs) -> StepGraph:
        """This rank's own graph, over its pieces and with its collectives; of simulated ranks that of the first.

        Collective, as `graph_for`.
        """
        laid = self.laid_out(*args, **kwargs)
        at = (0,) * laid.placement.ndim if self._parallel.simulated else self._parallel.coordinate
        return StepGraph(nn.Module(), self._parallel.local_graph(laid, at))

    def whole_parameters(self) -> AbstractContextManager[None]:
        return whole_state(self._scan())

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """What a call with these arguments does on a rank, without running it: layouts, collectives, bytes. Collective.

        With simulated ranks the arguments are whole; model and batch may be fake tensors, so that a plan for thousands of ranks needs no
        memory.
        """
        laid = self.laid_out(*args, **kwargs)
        return self._plan_at(laid, (0,) * laid.placement.ndim)

    def _plan_at(self, laid: LaidOut, coordinate: tuple[int, ...]) -> Plan:
        return make_plan(self.name, laid, self._parallel.local_graph(laid, coordinate), self.backend)

    def measure(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Takes one step, as a call does, and counts the bytes of all tensors meanwhile: this rank's plan, with `measured` filled in.

        Collective. Slower than a call. What a kernel needs while it runs is not counted, nor what lies within regions that "inductor" has
        compiled; `backend="aten"` shows every tensor. Raises StepError where ranks are simulated.
        """
        if self._parallel.simulated:
            raise StepError("measure() counts what a process holds: simulated ranks share this one. plan() predicts their memory.")
        leaves, structure, rebuild = flatten((args, kwargs))
        executor = self._agreed(leaves, structure, rebuild, args, kwargs).executor
        plan = self._plan_at(self._laid[executor], self._parallel.coordinate)
        with MemoryTracker(executor.held_tensors(leaves)) as tracker:
            self(*args, **kwargs)
        return dataclasses.replace(plan, measured=tracker.peak)

    def _agreed(self, leaves: list[Any], structure: Hashable, rebuild: Rebuild, args: Any, kwargs: Any) -> _Known:
        """The graph of a call that is the same call on every rank. Raises RankError on all of them where it is not."""
        parallel = self._parallel
        mark, numbers, known, refused = 0, 0, None, None
        try:
            inventory = self._scan()
            mark = self._mark(inventory, leaves, structure)
            numbers = hash((*(n.read() for n in inventory.numbers), *(leaf for leaf in leaves if isinstance(leaf, float))))
            known = self._known_for(mark, inventory, leaves)
        except Exception as exc:
            if parallel.agreement is None:
                raise
            refused = exc  # the other ranks wait to be told
        if parallel.agreement is None:
            return known or self._agree(mark, leaves, structure, rebuild, args, kwargs)
        serial = -1 if known is None else known.serial
        table = parallel.agreement.exchange(
            (mark, serial, numbers, refused is not None, parallel.generator_mark(None if known is None else known.executor))
        )
        if any(row[3] for row in table):
            parallel.agreement.all_or_none(refused)
        if len({row[2] for row in table}) > 1:
            self._numbers_differ(leaves)
        if known is not None and all(row[1] == serial for row in table) and known.marks == tuple(row[0] for row in table):
            parallel.note_generators([row[4] for row in table])
            return known
        return self._agree(mark, leaves, structure, rebuild, args, kwargs)

    def _mark(self, inventory: Inventory, leaves: list[Any], structure: Hashable) -> int:
        """64 bits of this rank's own signature. Raises what is wrong with the arguments."""
        if self._marked is None or self._marked[0] is not inventory:
            self._marked = (inventory, fingerprint64(stable_text(inventory.key)))
        key = (self._marked[1], structure, arguments_key(leaves, inventory.names), _surroundings(), self._variables())
        if key not in self._marks:
            self._marks[key] = fingerprint64(stable_text(key))
        return self._marks[key]

    def _known_for(self, mark: int, inventory: Inventory, leaves: list[Any]) -> _Known | None:
        """The graph of an earlier call with this mark, if it will do for this one."""
        known = self._known.get(mark)
        if known is None:
            return None
        known.executor.bind(inventory)  # other tensors with the same metadata, such as load_state_dict leaves behind
        return known if known.executor.accepts(leaves) else None

    def _numbers_differ(self, leaves: list[Any]) -> None:
        assert self._parallel.agreement is not None
        lines = [f"{n.name} = {n.read()}" for n in self._scan().numbers] + [f"float argument {v}" for v in leaves if isinstance(v, float)]
        self._parallel.agreement.check_equal("a number (learning rate, option of an optimizer, float argument)", "\n".join(lines))

    def _agree(self, mark: int, leaves: list[Any], structure: Hashable, rebuild: Rebuild, args: Any, kwargs: Any) -> _Known:
        """Tells the other ranks everything about the call, and finds or makes the graph for it."""
        parallel = self._parallel
        inventory = self._scan()
        variables = self._variables()
        marks: tuple[int, ...] = (mark,)
        if parallel.agreement is not None:
            marks = tuple(row[0] for row in parallel.agreement.exchange((mark,)))
        names = self._argument_names(args, kwargs, len(leaves))
        call = parallel.agree(leaves, names, inventory.names, (structure, _surroundings(), variables))
        parallel.sync_state(inventory)
        signature, executor = self._look_up(call.whole, structure)
        if parallel.agreement is not None:
            serials = [s for (s,) in parallel.agreement.exchange((-1 if executor is None else self._serials[executor],))]
            if len(set(serials)) > 1:
                graphs = dict(zip(sorted(parallel.placement.ranks), serials, strict=True))
                raise RankError(
                    "the ranks need different graphs for this call: which gradients are set on entry, or a number that the step "
                    f"branches on, differs between them (graph by rank, -1 for a new one: {graphs})"
                )
        if executor is None:
            self._call = call
            executor = self._make(signature, call.whole, rebuild)
        known = _Known(executor, self._serials[executor], call, marks)
        self._known[self._mark(self._scan(), leaves, structure)] = known
        parallel.note_generators([])
        return known

    def _argument_names(self, args: Any, kwargs: Any, count: int) -> list[str]:
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs).arguments
            names = [found for name, value in bound.items() for found in leaf_names(value, name)]
        except TypeError:
            names = []
        return names if len(names) == count else [f"argument {i}" for i in range(count)]

    # Making a graph

    def _traced(self, leaves: list[Any], rebuild: Rebuild, progress: Progress) -> Captured:
        with self._parallel.together():
            captured = functionalize(super()._traced(leaves, rebuild, progress))
        return self._parallel.in_one_order(captured)

    def _executor(self, captured: Captured, progress: Progress) -> Executor:
        assert self._call is not None
        parallel = self._parallel
        inventory = self._scan()
        progress.room("layout")
        with parallel.together():
            laid = parallel.lay_out(captured, inventory, self._call)
        if parallel.agreement is not None:
            parallel.agreement.check_equal("the graph of the step", plan_text(laid))
        progress.room("lowering")
        with parallel.together():
            executor = parallel.executor(laid, self._state, inventory)
        self._laid[executor] = laid
        self._serials[executor] = self.graphs_made
        return executor


def make_plan(name: str, laid: LaidOut, local: fx.Graph, backend: str) -> Plan:
    """The plan of a laid-out step, from the graph of its first rank."""
    placement = laid.placement
    names = placement.names or tuple(map(str, range(placement.ndim)))
    state = []
    nodes = local.find_nodes(op="placeholder")
    for source, found, whole, node in zip(laid.captured.inputs, laid.inputs, _placeholders(laid), nodes, strict=True):
        if found is not None and source.kind in ("parameter", "buffer", "optimizer", "gradient"):
            piece = node.meta["val"]
            size = piece.numel() * piece.element_size()
            state.append(PlannedTensor(source.kind, source.name, tuple(whole.meta["val"].shape), format_layout(found), size))
    collectives = []
    for c in collectives_of(local, placement.shape):
        user = None if c.source is None else c.source.user
        phase, module = ("", "") if c.source is None else (c.source.phase, c.source.module)
        dtype = str(c.dtype).removeprefix("torch.")
        line = "" if user is None else str(user)
        collectives.append(PlannedCollective(c.kind, names[c.mesh_dim], c.ranks, dtype, c.size, c.sent, phase, module, line))
    captured = laid.captured
    written = ["returned"] * captured.returned_count + [write.kind for write in captured.writes]
    memory = predict_memory(prepared_graph(local, backend), [i.kind for i in captured.inputs], written)
    return Plan(name, str(placement), tuple(state), tuple(collectives), memory)


def _placeholders(laid: LaidOut) -> list[fx.Node]:
    return laid.graph.find_nodes(op="placeholder")


def plan_text(laid: LaidOut) -> str:
    """Every op with the layouts of its arguments and of its result: equal on ranks that run the same plan."""
    lines = (f"{describe_node(n)}: {n.meta.get('needs', ())} -> {n.meta.get('layout', ())}" for n in laid.graph.nodes)
    return "\n".join(lines)
