"""How a step with a placement is made and called: what its ranks agree on, and which rooms its graph goes through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from monoflow.agreement import Agreement, fingerprint64, stable_text
from monoflow.capture.graph import Captured
from monoflow.compile import compile_guards
from monoflow.cutting import assemble, cut, whole_shape
from monoflow.errors import PlacementError, RankError, StepError
from monoflow.layout.lay_out import LaidOut, lay_out
from monoflow.layout.order import in_order, marks_of
from monoflow.layout.pins import Pins
from monoflow.lower.inplace import restore_inplace
from monoflow.lower.rank_graph import rank_graph
from monoflow.placement import Placement
from monoflow.rewrite import apply_layout_passes
from monoflow.run import Executor
from monoflow.run.distribute import distribute_state
from monoflow.run.groups import bind_groups
from monoflow.run.pieces import GlobalOutput, is_whole, local_piece
from monoflow.run.simulate import Simulated
from monoflow.sbp import Layout, Split, broadcast, format_layout, layout, match_layouts, of
from monoflow.state import Inventory, State
from monoflow.step import StepOptions
from monoflow.tree import is_global
from monoflow.world import current_world


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What the ranks have agreed on for a call: leaves of whole shapes, and the layouts of those that are tensors.

    `recut` are the leaves whose pieces are not those of `torch.chunk`, and are cut anew before the step.
    """

    whole: list[Any]
    layouts: dict[int, Layout]
    recut: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What the other ranks are told of an argument."""

    name: str
    text: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    found: Layout | None = None
    is_piece: bool = False


class Parallel:
    """The ranks of one step."""

    def __init__(self, options: StepOptions) -> None:
        assert options.placement is not None
        self.options = options
        self.placement = options.placement
        self.simulated = current_world().rank is None
        self.agreement = None if self.simulated else Agreement(self.placement)
        self.rank = -1 if self.simulated else int(current_world().rank or 0)
        self._synced: set[tuple[str, str]] = set()
        self._generators_equal: bool | None = None
        if not self.simulated:
            self.placement.mesh()

    @property
    def coordinate(self) -> tuple[int, ...]:
        found = self.placement.coordinate(self.rank)
        if found is None:
            raise StepError(f"rank {self.rank} is not part of {self.placement}, so it cannot call this step")
        return found

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done on every rank or on none: where it fails on one, an error is raised on all."""
        with contextlib.nullcontext() if self.agreement is None else self.agreement.together():
            yield

    # Agreeing on a call

    def agree(self, leaves: Sequence[Any], names: Sequence[str], state_names: Mapping[int, str], surroundings: Hashable) -> Call:
        """Tells the other ranks what this one was called with. Collective.

        Raises the same error on every rank where they do not fit together.
        """
        with self.together():
            mine = [self._leaf(leaf, name, state_names) for leaf, name in zip(leaves, names, strict=True)]
        if self.agreement is None:
            return Call(list(leaves), {i: leaf.found for i, leaf in enumerate(mine) if leaf.found is not None})
        everyone = self.agreement.exchange_objects((mine, stable_text(surroundings)))
        self._check_alike(everyone)
        whole, layouts, recut = list(leaves), {}, []
        for index, leaf in enumerate(mine):
            if leaf.found is None:
                continue
            layouts[index] = leaf.found
            if leaf.is_piece:
                shape, fits = self._whole_shape([tables[index] for tables, _ in everyone])
                if shape != leaf.shape:
                    whole[index] = self._blank(leaves[index], shape)
                if not fits:
                    recut.append(index)
            elif is_global(leaves[index]):
                whole[index] = self._blank(leaves[index], tuple(leaves[index].shape))
        return Call(whole, layouts, tuple(recut))

    def _leaf(self, leaf: Any, name: str, state_names: Mapping[int, str]) -> _Leaf:
        if not isinstance(leaf, torch.Tensor):
            return _Leaf(
                name, "float" if isinstance(leaf, float) else stable_text(leaf) if isinstance(leaf, Hashable) else type(leaf).__name__
            )
        if id(leaf) in state_names:
            return _Leaf(name, f"state {state_names[id(leaf)]}")
        if leaf.device.type != self.placement.device_type:
            raise PlacementError(f"argument {name} is on {leaf.device}, the step's placement is {self.placement}: move the tensor there")
        text = f"{leaf.dtype}, requires_grad={leaf.requires_grad}"
        if is_global(leaf):
            if Placement.of(leaf) != self.placement:
                raise PlacementError(f"argument {name} lives on {Placement.of(leaf)}, the step on {self.placement}: use mf.to_global first")
            found = of(leaf)
            return _Leaf(name, f"{text}, {format_layout(found)}", tuple(leaf.shape), leaf.dtype, found)
        found = self.input_layout(name, leaf.dim())
        return _Leaf(name, text, tuple(leaf.shape), leaf.dtype, found, True)

    def input_layout(self, name: str, rank: int) -> Layout:
        """How a plain argument lies: as `inputs` says, else cut in dimension 0 over the first mesh dimension (B if it has no dimension)."""
        given = self.options.inputs
        ndim = self.placement.ndim
        if isinstance(given, Mapping):
            match = [v for pattern, v in given.items() if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
            if match:
                return layout(match[-1], ndim, rank)
        elif given is not None:
            return layout(given, ndim, rank)
        if rank == 0:
            return (broadcast,) * ndim
        return (Split(0), *(broadcast,) * (ndim - 1))

    def _check_alike(self, everyone: list[tuple[list[_Leaf], str]]) -> None:
        order = sorted(self.placement.ranks)
        first, first_text = everyone[0]
        for rank, (leaves, text) in zip(order[1:], everyone[1:], strict=True):
            if len(leaves) != len(first):
                raise RankError(
                    f"the step is called with {len(first)} argument values on rank {order[0]}, with {len(leaves)} on rank {rank}"
                )
            for one, other in zip(first, leaves, strict=True):
                if (one.name, one.text, len(one.shape)) != (other.name, other.text, len(other.shape)):
                    raise RankError(
                        f"argument {one.name} differs: {_describe(one)} on rank {order[0]}, {_describe(other)} on rank {rank}. "
                        "Every rank passes its part of the same batch: same structure, dtypes and number of dimensions."
                    )
                fixed = [d for d in range(len(one.shape)) if one.found is None or Split(d) not in one.found]
                if any(one.shape[d] != other.shape[d] for d in fixed):
                    raise RankError(
                        f"argument {one.name} has shape {one.shape} on rank {order[0]}, {other.shape} on rank {rank}: pieces may differ "
                        f"only in the dimension that is cut ({format_layout(one.found) if one.found else 'none'})"
                    )
            if text != first_text:
                raise RankError(f"the step differs between ranks {order[0]} and {rank}: {first_text} against {text}")

    def _whole_shape(self, leaves: list[_Leaf]) -> tuple[tuple[int, ...], bool]:
        """The shape of the whole of which every rank has a piece, and whether they are cut as `torch.chunk` cuts."""
        by_rank = dict(zip(sorted(self.placement.ranks), leaves, strict=True))
        shapes = [by_rank[r].shape for r in self.placement.ranks]
        found = leaves[0].found
        assert found is not None
        return whole_shape(shapes, found, self.placement.shape, f"argument {leaves[0].name}")

    @staticmethod
    def _blank(leaf: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of the whole shape, for capture to look at; its memory is never touched."""
        return torch.empty(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)

    def recut(self, leaf: torch.Tensor, found: Layout) -> torch.Tensor:
        """This rank's piece as `torch.chunk` cuts, from pieces that were cut otherwise. Collective."""
        assert self.agreement is not None
        pieces = self.agreement.exchange_objects(leaf.detach().cpu())
        by_rank = dict(zip(sorted(self.placement.ranks), pieces, strict=True))
        whole = assemble([by_rank[r] for r in self.placement.ranks], found, self.placement.shape)
        return cut(whole, found, self.placement.shape, self.coordinate).to(leaf.device)

    # Randomness

    def generator_mark(self, executor: Executor | None) -> int:
        """64 bits of the state of PyTorch's generator, 0 where the graph draws nothing."""
        if executor is None or not executor.draws:
            return 0
        return fingerprint64(torch.get_rng_state().numpy().tobytes())

    def note_generators(self, marks: Sequence[int]) -> None:
        """Whether the generators of all ranks stand alike, by their marks; empty where that has not been asked."""
        self._generators_equal = len(set(marks)) == 1 if marks else None

    @contextlib.contextmanager
    def randomness(self, executor: Executor) -> Iterator[None]:
        """Inside, every rank draws from the first rank's generator; after, the others go on with their own."""
        if self.agreement is None or not executor.draws:
            yield
            return
        if self._generators_equal is None:
            self.note_generators([m for (m,) in self.agreement.exchange((self.generator_mark(executor),))])
        if self._generators_equal:
            yield
            return
        with self.agreement.first_generator():
            yield

    # State

    def pins(self, inventory: Inventory, call: Call) -> Pins:
        """What is known of layouts before deduction."""
        entries = [e for e in inventory.tensors if e.kind != "optimizer"]
        shapes = {e.name: tuple(e.tensor.shape) for e in entries}
        found = match_layouts(self.options.layout, shapes, self.placement.ndim) if self.options.layout else {}
        for entry in inventory.tensors:
            if is_global(entry.tensor):
                if Placement.of(entry.tensor) != self.placement:
                    raise PlacementError(f"{entry.kind} {entry.name} lives on {Placement.of(entry.tensor)}, the step on {self.placement}")
                found[entry.name] = of(entry.tensor)
        return Pins(found, call.layouts)

    def sync_state(self, inventory: Inventory) -> None:
        """Makes plain parameters, buffers and optimizer state those of the first rank, or checks that they are.

        Collective, once for each tensor.
        """
        if self.agreement is None:
            return
        entries = [e for e in inventory.tensors if (e.kind, e.name) not in self._synced and not is_global(e.tensor)]
        self._synced.update((e.kind, e.name) for e in entries)
        self.agreement.check_equal(
            "the state of the step (parameters, buffers, optimizer state)",
            "\n".join(f"{e.kind} {e.name} {tuple(e.tensor.shape)} {e.tensor.dtype}" for e in entries),
        )
        if self.options.sync == "error":
            self._check_state(entries)
            return
        with torch.no_grad():
            for entry in entries:
                held = entry.tensor.detach().cpu().contiguous()
                self.agreement.broadcast(held)
                if held.data_ptr() != entry.tensor.data_ptr():
                    entry.tensor.copy_(held)

    def _check_state(self, entries: list[Any]) -> None:
        assert self.agreement is not None
        lines = []
        for entry in entries:
            data = entry.tensor.detach().cpu().contiguous()
            lines.append(f"{entry.kind} {entry.name} {fingerprint64(data.reshape(-1).view(torch.uint8).numpy().tobytes())}")
        self.agreement.check_equal("the values of the state", "\n".join(lines))

    # Making a graph

    def in_one_order(self, captured: Captured) -> Captured:
        """The ops of a functional graph in the order that they have on the first rank. Collective."""
        if self.agreement is None:
            return captured
        marks = marks_of(captured)
        if len({m for (m,) in self.agreement.exchange([fingerprint64("".join(marks))])}) == 1:
            return captured
        first = self.agreement.exchange_objects(marks)[0]
        with self.together():
            return in_order(captured, first)

    def lay_out(self, captured: Captured, inventory: Inventory, call: Call) -> LaidOut:
        pins = self.pins(inventory, call)
        return apply_layout_passes(lay_out(captured, self.placement, pins), self.options.layout_passes, pins)

    def local_graph(self, laid: LaidOut, coordinate: tuple[int, ...]) -> fx.Graph:
        """One rank's graph, ready to be compiled but for the names of its process groups."""
        graph = rank_graph(laid, coordinate, self.options.random)
        restore_inplace(graph)
        return graph

    def executor(self, laid: LaidOut, state: State, inventory: Inventory) -> Executor:
        """The executor of this rank (of all of them where they are simulated); distributes the state as the graph wants it."""
        captured = laid.captured
        guards = compile_guards(captured.guards)
        if self.simulated:
            executor = Executor(captured, guards)
            executor.executable = Simulated(laid, self.options.random)
            return executor
        local = self.local_graph(laid, self.coordinate)
        bind_groups(local, self.placement)
        outputs = [self._output(node, found) for node, found in zip(_outputs(captured), laid.outputs, strict=True)]
        distribute_state(state, inventory, _not_whole(laid), self.placement)
        return Executor(captured, guards, graph=local, take=local_piece, outputs=outputs)

    def _output(self, node: Any, found: Layout | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if found is None or is_whole(found):
            return None
        value = node.meta["val"]
        return GlobalOutput(self.placement, found, value.shape, value.stride())


def _outputs(captured: Captured) -> tuple[Any, ...]:
    (output,) = captured.graph.graph.find_nodes(op="output")
    found: tuple[Any, ...] = output.args[0]
    return found


def _not_whole(laid: LaidOut) -> dict[tuple[str, str], Layout]:
    """The layouts of the state's tensors that are not B, by kind and name."""
    kinds = ("parameter", "buffer", "optimizer")
    pairs = zip(laid.captured.inputs, laid.inputs, strict=True)
    return {(i.kind, i.name): found for i, found in pairs if found is not None and i.kind in kinds and not is_whole(found)}


def _describe(leaf: _Leaf) -> str:
    return f"{leaf.text}, shape {leaf.shape}" if leaf.dtype is not None else leaf.text
