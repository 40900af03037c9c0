"""Moves: a change of layout along one mesh dimension, which one collective (or none) does.

Along a mesh dimension a value can go

    B -> S     a slice                      S -> B      all-gather             P -> B    all-reduce
    B -> P     one rank keeps it            S -> S'     all-to-all             P -> S    reduce-scatter
                                            S -> P      zeros around the piece (sums only)

and everything else goes through B. Where several mesh dimensions cut one tensor dimension, or hold terms whose reductions do not
commute (a sum of maxima), the outer one was applied first: it can only leave, and enter, when no inner one is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from monoflow.sbp import Broadcast, Layout, Partial, Sbp, Split


@dataclass(frozen=True, slots=True)
class Move:
    """Mesh dimension `mesh_dim` goes from `src` to `dst`; the others stay."""

    mesh_dim: int
    src: Sbp
    dst: Sbp

    def apply(self, layout: Layout) -> Layout:
        """The layout after the move."""
        return (*layout[: self.mesh_dim], self.dst, *layout[self.mesh_dim + 1 :])

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst} on mesh dimension {self.mesh_dim}"


def possible_moves(layout: Layout, dst: Layout, splits: tuple[Split, ...]) -> Iterator[Move]:
    """The moves out of `layout` on a way to `dst`: to B, to one of `splits`, or to the term that `dst` asks for."""
    for mesh_dim, sbp in enumerate(layout):
        inner = layout[mesh_dim + 1 :]
        if _is_under(sbp, inner):
            continue
        if not isinstance(sbp, Broadcast):
            yield Move(mesh_dim, sbp, _B)
        for target in splits:
            if target != sbp and not _is_under(target, inner):
                yield Move(mesh_dim, sbp, target)
        wanted = dst[mesh_dim]
        if isinstance(wanted, Partial) and _can_become_term(sbp, wanted) and not _is_under(wanted, inner):
            yield Move(mesh_dim, sbp, wanted)


_B = Broadcast()

_COMMUTING = {"sum": "linear", "mean": "linear", "max": "greatest", "any": "greatest", "min": "least", "all": "least", "prod": "product"}


def _is_under(sbp: Sbp, inner: Layout) -> bool:
    """True where an inner mesh dimension was applied to what `sbp` made."""
    if isinstance(sbp, Split):
        return sbp in inner
    if isinstance(sbp, Partial):
        return any(_COMMUTING[s.reduction] != _COMMUTING[sbp.reduction] for s in inner if isinstance(s, Partial))
    return False


def _can_become_term(sbp: Sbp, wanted: Partial) -> bool:
    return isinstance(sbp, Broadcast) or (isinstance(sbp, Split) and wanted.reduction == "sum")
