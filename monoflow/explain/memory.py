"""Predicts the memory that a rank's graph takes: what is held between steps, and the peak during one, with the op where it comes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload, storage_id
from monoflow.capture.graph import format_call, is_collective, is_wait, last_uses, phase_of, tensors_of
from monoflow.control_edge import after
from monoflow.source import OpInfo


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's tensors.

    parameters, buffers, state, gradients   between steps
    arguments       of the call
    peak            during a step, all of these included
    activations, communication, update      beside these, at the peak: made by forward and backward pass, by collectives, by the update
    op, line        the op after which the peak is reached, and the user's line
    """

    parameters: int = 0
    buffers: int = 0
    state: int = 0
    gradients: int = 0
    arguments: int = 0
    peak: int = 0
    activations: int = 0
    communication: int = 0
    update: int = 0
    op: str = ""
    line: str = ""

    @property
    def between_steps(self) -> int:
        """Bytes of parameters, gradients and optimizer state that a rank holds between steps."""
        return self.parameters + self.gradients + self.state


_KINDS = {"parameter": "parameters", "buffer": "buffers", "optimizer": "state", "gradient": "gradients"}


def predict_memory(graph: fx.Graph, kinds: Sequence[str], written: Sequence[str]) -> Memory:
    """The memory of a graph that runs op by op and frees every value after its last use.

    Args:
        graph: as it runs.
        kinds: what each placeholder is: "parameter", "optimizer", "argument", ...
        written: what becomes of each output: "returned", "gradient", ...
    """
    walk = _Walk(graph)
    held: Counter[str] = Counter()
    for node, kind in zip(graph.find_nodes(op="placeholder"), kinds, strict=True):
        held[_KINDS.get(kind, "arguments")] += walk.hold(node)
    walk.run()
    left = {walk.storage_of(t): t.untyped_storage().nbytes() for t in _written_tensors(graph, written, "gradient")}
    held["gradients"] = sum(left.values())
    info = None if walk.peak_node is None else walk.peak_node.meta.get("op")
    return Memory(
        **held,
        peak=walk.peak,
        **walk.at_peak,
        op="" if walk.peak_node is None else format_call(walk.peak_node),
        line=str(info.user) if isinstance(info, OpInfo) and info.user is not None else "",
    )


def _written_tensors(graph: fx.Graph, written: Sequence[str], kind: str) -> Iterator[torch.Tensor]:
    outputs: Any = graph.output_node().args[0]
    for node, found in zip(outputs, written, strict=True):
        if found == kind and isinstance(node, fx.Node):
            yield from tensors_of(node)


class _Walk:
    """Storages come with the ops that make them and go with the last value that lies in them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.same: dict[int, int] = {}
        self.alive: dict[int, tuple[str, int]] = {}
        self.held: set[int] = set()
        self.total = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.peak_node: fx.Node | None = None
        self._link()

    def storage_of(self, tensor: torch.Tensor) -> int:
        key = storage_id(tensor)
        while key in self.same:
            key = self.same[key]
        return key

    def hold(self, placeholder: fx.Node) -> int:
        """Bytes of an input, which stays; 0 for memory that is counted already."""
        size = 0
        for tensor in tensors_of(placeholder):
            key = self.storage_of(tensor)
            if key not in self.held:
                self.held.add(key)
                size += tensor.untyped_storage().nbytes()
        self.total += size
        self.peak = self.total
        return size

    def run(self) -> None:
        frees = last_uses(self.graph.nodes)
        names = Counter(key for node in self.graph.nodes for key in self._storages(node))
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            for tensor in tensors_of(node):
                key = self.storage_of(tensor)
                if key not in self.held and key not in self.alive:
                    size = tensor.untyped_storage().nbytes()
                    self.alive[key] = (_category(node), size)
                    self.total += size
            if self.total > self.peak:
                self.peak, self.peak_node = self.total, node
                self.at_peak = Counter()
                for category, size in self.alive.values():
                    self.at_peak[category] += size
            for key in (key for value in frees.get(node, ()) for key in self._storages(value)):
                names[key] -= 1
                if not names[key] and key in self.alive:
                    self.total -= self.alive.pop(key)[1]

    def _storages(self, node: fx.Node) -> set[int]:
        return set(map(self.storage_of, tensors_of(node)))

    def _link(self) -> None:
        """Results that lie in the memory of an argument, where their metadata do not say so."""
        for node in self.graph.nodes:
            if node.op == "call_function" and _is_in_place(node):
                source: Any = node.args[0]
                for one, other in zip(tensors_of(node), tensors_of(source), strict=False):
                    left, right = self.storage_of(one), self.storage_of(other)
                    if left != right:
                        self.same[left] = right


def _is_in_place(node: fx.Node) -> bool:
    """True for an op whose result is its first argument: waits, control edges, ops in place."""
    target = node.target
    if is_wait(target) or target is after:
        return True
    if not isinstance(target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    first, returns = target._schema.arguments[0], target._schema.returns
    return bool(first.alias_info and first.alias_info.is_write and len(returns) == 1 and returns[0].alias_info)


def _category(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return _category(node.args[0])  # type: ignore[arg-type]
    if is_collective(node.target):
        return "communication"
    return "update" if phase_of(node) == "update" else "activations"
