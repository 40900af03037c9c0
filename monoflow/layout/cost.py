"""What a change of layout costs: bytes sent by one rank over bandwidth, plus latency, for each mesh dimension.

The numbers only have to rank alternatives. Those of `cpu` are gloo's on one machine (`python -m benchmarks.collectives`), those of `cuda`
NVLink's.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

from monoflow.layout.moves import Move, possible_moves
from monoflow.sbp import Broadcast, Layout, Partial, Split, piece_of

FREE = 1e-8
"""Seconds for a move without communication: above zero, so that staying is cheaper."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks along a mesh dimension: `bandwidth` in bytes per second, `latency` of a collective in seconds."""

    bandwidth: float
    latency: float

    @property
    def worthwhile(self) -> int:
        """Bytes from which on a collective is worth starting by itself: latency is a twentieth of the time they take."""
        return int(20 * self.latency * self.bandwidth)


@dataclass(frozen=True, slots=True)
class Costs:
    """The link of every mesh dimension; `overrides` are (mesh dimension, link) pairs for those that differ, such as between machines."""

    link: Link
    overrides: tuple[tuple[int, Link], ...] = ()

    def along(self, mesh_dim: int) -> Link:
        """The link along a mesh dimension."""
        return next((link for dim, link in self.overrides if dim == mesh_dim), self.link)


DEFAULTS = {
    "cpu": Costs(Link(bandwidth=1e9, latency=100e-6)),
    "cuda": Costs(Link(bandwidth=150e9, latency=15e-6)),
}
"""By device type."""


def bytes_sent(move: Move, parts: int, local_bytes: float) -> float:
    """Bytes that one rank sends in a move over `parts` ranks; `local_bytes` is the size of what it holds before."""
    if parts == 1 or isinstance(move.src, Broadcast) or isinstance(move.dst, Partial):
        return 0.0
    share = local_bytes * (parts - 1) / parts
    if isinstance(move.src, Partial):
        return share if isinstance(move.dst, Split) else 2 * share
    return share if isinstance(move.dst, Split) else share * parts


def move_cost(move: Move, parts: int, local_bytes: float, costs: Costs = DEFAULTS["cpu"]) -> float:
    """Seconds that a move takes over `parts` ranks; `local_bytes` is the size of what a rank holds before it."""
    sent = bytes_sent(move, parts, local_bytes)
    if sent == 0.0 and (parts == 1 or isinstance(move.src, Broadcast) or isinstance(move.dst, Partial)):
        return FREE
    link = costs.along(move.mesh_dim)
    return FREE + link.latency + sent / link.bandwidth


def transfer_cost(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], costs: Costs = DEFAULTS["cpu"]
) -> float:
    """Seconds that the cheapest moves from `src` to `dst` take for a tensor of the whole `shape`; 0 where the layouts are equal."""
    return 0.0 if src == dst else _cheapest(src, dst, shape, itemsize, mesh_shape, costs)[0]


def plan_moves(
    src: Layout, dst: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...], itemsize: int = 4, costs: Costs = DEFAULTS["cpu"]
) -> tuple[Move, ...]:
    """The cheapest moves from `src` to `dst` for a tensor of the whole `shape`, in order. The same on every rank."""
    return () if src == dst else _cheapest(src, dst, tuple(shape), itemsize, mesh_shape, costs)[1]


@functools.lru_cache(maxsize=1 << 16)
def _cheapest(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], costs: Costs
) -> tuple[float, tuple[Move, ...]]:
    """Dijkstra's shortest way over layouts. One always exists: every dimension to B, inner ones first, then on, outer ones first."""
    splits = tuple(dict.fromkeys(s for s in (*src, *dst) if isinstance(s, Split)))
    first = (0,) * len(mesh_shape)  # its pieces are the longest
    ticket = itertools.count()
    queue: list[tuple[float, int, Layout, tuple[Move, ...]]] = [(0.0, next(ticket), src, ())]
    done: set[Layout] = set()
    while True:
        cost, _, layout, moves = heapq.heappop(queue)
        if layout == dst:
            return cost, moves
        if layout in done:
            continue
        done.add(layout)
        held = math.prod(piece_of(shape, layout, mesh_shape, first)[1]) * itemsize
        for move in possible_moves(layout, dst, splits):
            after = move.apply(layout)
            if after not in done:
                step = move_cost(move, mesh_shape[move.mesh_dim], held, costs)
                heapq.heappush(queue, (cost + step, next(ticket), after, (*moves, move)))
