"""ZeRO as a rewrite of layouts (Rajbhandari et al., 2020: ZeRO, Memory Optimizations Toward Training Trillion Parameter Models).

Stage 1  the optimizer's state lies in pieces, B -> S(0). Gradients go into the update in pieces, so that they are reduce-scattered; the
         updated pieces of the parameters are gathered.
Stage 2  gradients as well: what the step leaves in `.grad`, and takes from there, are pieces.
Stage 3  parameters as well: gathered before their first use in the forward pass, gathered again for the backward pass, freed after the last
         use in each.

Written with what every pass on the laid-out graph has: `LaidOut.pin` and `LaidOut.convert`. Which collectives follow from it, how they are
joined and when they start is the business of other rooms.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monoflow._torch import OpOverload
from monoflow.capture.graph import phase_of
from monoflow.errors import PlacementError, StepError
from monoflow.layout.lay_out import LaidOut, Schedule
from monoflow.placement import Placement
from monoflow.rewrite.on_layout import OnLayout, on_layout
from monoflow.sbp import Broadcast, Layout, Partial, Split

WASTE = 1 << 14
"""Elements that dimension 0 may waste, by filling pieces up to one length, before another dimension is cut instead."""

_aten = torch.ops.aten

CARRIED = (_aten._to_copy.default, _aten.clone.default)
"""Ops beside views that are repeated for the backward pass rather than kept from the forward pass: they cost no more than a copy."""


@dataclass(frozen=True, slots=True)
class Zero:
    """What to shard, and how.

    Args:
        stage: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well.
        dim: the mesh dimension over which it is sharded, by name or number; that of the data. Others keep their layout.
        min_size: elements below which a tensor stays whole.
        prefetch: stage 3: buckets of parameters that are gathered ahead of the one in use.
        bucket_bytes: size from which on a bucket is closed; None takes it from the cost model.

    Raises: StepError for values that make no sense.
    """

    stage: int = 1
    dim: int | str = 0
    min_size: int = 1
    prefetch: int = 1
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise StepError(f"zero={self.stage!r}: the stages of ZeRO are 0, 1, 2 and 3")
        for name in ("min_size", "prefetch", "bucket_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise StepError(f"mf.Zero({name}={value!r}): give a number that is not negative")


def zero_passes(given: int | Zero) -> list[OnLayout]:
    """The passes that a `zero=` option stands for. Raises StepError."""
    options = given if isinstance(given, Zero) else Zero(given)

    def zero(laid: LaidOut) -> LaidOut:
        return _Sharding(laid, options).run()

    return [on_layout(zero)] if options.stage else []


class _Sharding:
    def __init__(self, laid: LaidOut, options: Zero) -> None:
        self.laid = laid
        self.options = options
        self.dim = _mesh_dim(laid.placement, options.dim)
        self.parts = laid.placement.shape[self.dim]
        self.shapes = {laid.shape(name) for name in laid.names("parameter")}

    def run(self) -> LaidOut:
        stage, laid = self.options.stage, self.laid
        for name in laid.names("optimizer"):
            self._shard(name)
        if stage >= 2:
            for name in laid.names("gradient"):
                self._shard(name)
        for node in [*laid.graph.nodes]:
            self._scatter(node)
        if stage == 3:
            for name in laid.names("parameter"):
                self._gather(name)
        return dataclasses.replace(laid, schedule=Schedule(self.options.prefetch, self.options.bucket_bytes))

    def _shard(self, name: str) -> bool:
        wanted = self._cut(self.laid.shape(name), self.laid.layout(name))
        if wanted is not None:
            self.laid.pin(name, wanted)
        return wanted is not None

    def _cut(self, shape: tuple[int, ...], found: Layout) -> Layout | None:
        """The layout in pieces: S(0), or another dimension where 0 is cut already or too short. None for what stays whole."""
        free = [d for d in range(len(shape)) if Split(d) not in found]
        if isinstance(found[self.dim], Split) or not free or math.prod(shape) < max(self.options.min_size, 1):
            return None
        if shape not in self.shapes and shape[free[0]] < self.parts:  # state of another shape, such as the mean of all rows
            return None
        first = free[0]
        if self._waste(shape, first) > WASTE:
            first = min(free, key=lambda d: self._waste(shape, d))
        return (*found[: self.dim], Split(first), *found[self.dim + 1 :])

    def _waste(self, shape: tuple[int, ...], dim: int) -> int:
        """Elements by which the pieces are more than the whole."""
        return -shape[dim] % self.parts * (math.prod(shape) // shape[dim])

    # Gradients

    def _scatter(self, node: fx.Node) -> None:
        """What the backward pass hands to the update in the shape of a parameter, the update takes in pieces."""
        value = node.meta.get("val")
        if node.op != "call_function" or phase_of(node) == "update" or not isinstance(value, torch.Tensor):
            return
        users = [user for user in node.users if user.op == "output" or phase_of(user) == "update"]
        if tuple(value.shape) not in self.shapes or not value.is_floating_point() or all(user.op == "output" for user in users):
            return
        wanted = self._cut(tuple(value.shape), _reduced(node.meta["layout"]))
        if wanted is not None:
            self.laid.convert(node, wanted, users)

    # Parameters

    def _gather(self, name: str) -> None:
        """A parameter in pieces, whole where the forward pass uses it and, anew, where the backward pass does.

        Casts to a smaller type are made before: what is gathered is their result.
        """
        whole, parameter = self.laid.layout(name), self.laid.placeholder(name)
        if parameter is None or not self._shard(name):
            return
        for root in _roots(parameter):
            backward = _made_again(root)
            forward = [
                u for u in root.users if u not in backward and u.op == "call_function" and phase_of(u) != "update" and not _shrinks(u)
            ]
            for users in (forward, backward):
                if users:
                    self.laid.convert(root, whole, users, alone=True)


def _roots(parameter: fx.Node) -> list[fx.Node]:
    """A parameter, and what is made of it by casts to smaller types outside the update."""
    return [parameter, *(u for carrier in _carriers(parameter) for u in carrier.users if _shrinks(u))]


def _made_again(root: fx.Node) -> list[fx.Node]:
    """Gives the backward pass views of its own. Returns the users of the root that belong to it."""
    carriers = dict.fromkeys(_carriers(root))
    again: dict[fx.Node, fx.Node] = {root: root}

    def copy(carrier: fx.Node, user: fx.Node) -> fx.Node:
        if carrier not in again:
            (source,) = carrier.all_input_nodes
            made = copy(source, user)
            with root.graph.inserting_before(user):
                node = again[carrier] = root.graph.node_copy(carrier, lambda n: made)
            node.meta["op"] = user.meta["op"]
        return again[carrier]

    uses = [(user, carrier) for carrier in carriers for user in carrier.users if phase_of(user) == "backward" and user not in carriers]
    direct: dict[fx.Node, None] = {}
    for user, carrier in sorted(uses, key=lambda use: use[0]):
        if not _shrinks(user):
            user.replace_input_with(carrier, copy(carrier, user))
            if carrier is root:
                direct[user] = None
    return [*direct, *(node for node in again.values() if root in node.all_input_nodes)]


def _carriers(root: fx.Node) -> Iterator[fx.Node]:
    """A value, its views and copies outside the update, and theirs."""
    yield root
    for user in root.users:
        if _carries(user):
            yield from _carriers(user)


def _carries(user: fx.Node) -> bool:
    target = user.target
    if not isinstance(target, OpOverload) or phase_of(user) == "update" or _shrinks(user):
        return False
    return (target.is_view or target in CARRIED) and len(user.all_input_nodes) == 1


def _shrinks(node: fx.Node) -> bool:
    """True for a cast to a smaller type."""
    if node.target is not _aten._to_copy.default:
        return False
    source: Any = node.args[0]
    return bool(node.meta["val"].element_size() < source.meta["val"].element_size())


def _reduced(found: Layout) -> Layout:
    """The layout with partial sums made whole."""
    return tuple(Broadcast() if isinstance(sbp, Partial) else sbp for sbp in found)


def _mesh_dim(placement: Placement, given: int | str) -> int:
    """The number of a mesh dimension. Raises PlacementError."""
    names = placement.names or ()
    if isinstance(given, str) and given in names:
        return names.index(given)
    if isinstance(given, int) and -placement.ndim <= given < placement.ndim:
        return given % placement.ndim
    known = f"named {', '.join(names)}" if names else f"numbered 0 to {placement.ndim - 1}"
    raise PlacementError(f"mf.Zero(dim={given!r}): {placement} has no such dimension; its dimensions are {known}")
