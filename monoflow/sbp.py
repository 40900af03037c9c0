"""How a tensor lies over the ranks of a mesh: `split`, `broadcast` or `partial`, one for each mesh dimension (OneFlow's SBP).

S(d)    each rank holds a piece of dimension d, cut as `torch.chunk` cuts (the first pieces may be longer, the last ones shorter or empty)
B       each rank holds the whole tensor
P       the whole is the elementwise sum of what the ranks hold; P(max), P(min), ... are combined by another reduction
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

from monoflow.errors import LayoutError, SbpError

Reduction = Literal["sum", "mean", "max", "min", "prod", "any", "all"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True, slots=True)
class Split:
    """Pieces of dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The whole on every rank."""

    def __str__(self) -> str:
        return "B"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Partial:
    """Terms, whose `reduction` over the ranks is the whole."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"

    __repr__ = __str__


Sbp: TypeAlias = Split | Broadcast | Partial
Layout: TypeAlias = tuple[Sbp, ...]
"""One Sbp for each dimension of a mesh, outermost first.

Two splits of one tensor dimension cut it first by the outer, then by the inner.
"""

SbpLike: TypeAlias = Sbp | str
LayoutLike: TypeAlias = SbpLike | Sequence[SbpLike]
"""What users may write: "S(0)", `mf.sbp.broadcast`, or a list of these."""

broadcast = Broadcast()
partial_sum = Partial()


def split(dim: int) -> Split:
    """Each rank holds a piece of dimension `dim`; negative dimensions count from the last, as everywhere in PyTorch."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"mf.sbp.split takes the number of a dimension, got {dim!r}")
    return Split(dim)


def partial(reduction: str = "sum") -> Partial:
    """Each rank holds a term; the whole is their `reduction`: "sum", "mean", "max", "min", "prod", "any" or "all"."""
    if reduction not in REDUCTIONS:
        raise SbpError(f"mf.sbp.partial knows no reduction {reduction!r}: choose {', '.join(map(repr, REDUCTIONS))}")
    return Partial(reduction)  # type: ignore[arg-type]


_TEXT = re.compile(r"\s*(?:(?P<b>B)|S\(\s*(?P<dim>-?\d+)\s*\)|P(?:\(\s*(?P<reduction>\w+)\s*\))?)\s*")


def parse(text: SbpLike) -> Sbp:
    """ "S(0)", "B", "P" or "P(max)" as an object; objects as they are. Raises SbpError."""
    if isinstance(text, Split | Broadcast | Partial):
        return text
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise SbpError(
            f'not an SBP: {text!r}. Write "S(0)", "B", "P", "P(max)", or use mf.sbp.split(0), mf.sbp.broadcast, mf.sbp.partial_sum'
        )
    if found["b"]:
        return broadcast
    if found["dim"] is not None:
        return Split(int(found["dim"]))
    return partial(found["reduction"] or "sum")


def layout(given: LayoutLike, mesh_dims: int, tensor_dims: int | None = None) -> Layout:
    """What the user wrote as a Layout for a mesh of `mesh_dims` dimensions; a single SBP does for a mesh of one dimension.

    With `tensor_dims`, split dimensions are checked and negative ones counted from the end. Raises SbpError.
    """
    found = _parsed(given)
    if len(found) != mesh_dims:
        wanted = "one SBP for each dimension of the placement"
        raise SbpError(f"{format_layout(found)} has {len(found)} SBP(s), the placement has {mesh_dims} dimension(s): give {wanted}")
    return found if tensor_dims is None else tuple(_checked(s, tensor_dims) for s in found)


def _checked(sbp: Sbp, tensor_dims: int) -> Sbp:
    if not isinstance(sbp, Split):
        return sbp
    if not -tensor_dims <= sbp.dim < tensor_dims:
        allowed = f"dimensions {-tensor_dims} to {tensor_dims - 1}" if tensor_dims else "no dimension to split (use B)"
        raise SbpError(f"{sbp} splits a dimension that is not there: the tensor has {allowed}")
    return Split(sbp.dim % tensor_dims)


def listed(given: LayoutLike) -> list[str]:
    """What the user wrote as a list of texts. Raises SbpError."""
    return [str(sbp) for sbp in _parsed(given)]


def _parsed(given: LayoutLike) -> Layout:
    items = [given] if isinstance(given, str | Split | Broadcast | Partial) else given
    return tuple(map(parse, items))


def match_layouts(patterns: Mapping[str, LayoutLike], shapes: Mapping[str, tuple[int, ...]], mesh_dims: int) -> dict[str, Layout]:
    """The layout of each name that a pattern fits (shell wildcards, as in fnmatch); the last pattern that fits wins.

    Raises: LayoutError for a pattern that fits no name, SbpError for a layout that does not fit the mesh or the shape.
    """
    found: dict[str, Layout] = {}
    for pattern, given in patterns.items():
        names = [name for name in shapes if fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(f"layout pattern {pattern!r} fits no parameter or buffer. There are: {_some(shapes)}")
        for name in names:
            try:
                found[name] = layout(given, mesh_dims, len(shapes[name]))
            except SbpError as exc:
                raise SbpError(f"layout pattern {pattern!r}, for {name} of shape {shapes[name]}: {exc}") from None
    return found


def _some(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:8]) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")


_OF_REDUCE_OPS = {"sum": "sum", "avg": "mean", "max": "max", "min": "min", "product": "prod"}


def of(tensor: Any) -> Layout:
    """The layout of a global tensor: one Sbp for each dimension of its mesh. Raises SbpError for a plain tensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        raise SbpError(f"a plain {type(tensor).__name__} has no SBP: mf.distribute or mf.to_global makes global tensors")
    return tuple(map(_of_placement, placements))


def _of_placement(placement: Any) -> Sbp:
    """PyTorch's term for it as an Sbp; its types know themselves, so that nothing of PyTorch has to be imported here."""
    if placement.is_replicate():
        return broadcast
    if placement.is_partial() and placement.reduce_op in _OF_REDUCE_OPS:
        return Partial(_OF_REDUCE_OPS[placement.reduce_op])  # type: ignore[arg-type]
    if type(placement).__name__ != "Shard":
        raise SbpError(f"{placement} is a layout of PyTorch's that SBP has no word for")
    return Split(placement.dim)


def format_layout(found: Layout) -> str:
    """`S(0)` for one mesh dimension, `[S(0), B]` for more."""
    return str(found[0]) if len(found) == 1 else f"[{', '.join(map(str, found))}]"


def piece_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index` of a dimension of `size` cut in `parts`: `torch.chunk`'s convention, empty pieces included."""
    chunk = -(-size // parts) if size else 0
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def piece_number(found: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> int:
    """A number for the piece that a rank holds: equal on ranks that hold the same one."""
    number = 0
    for sbp, parts, index in zip(found, mesh_shape, coordinate, strict=True):
        if isinstance(sbp, Split):
            number = number * parts + index
    return number


def piece_of(shape: Sequence[int], found: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[list[int], list[int]]:
    """(offsets, sizes) of the piece that the rank at `coordinate` of the mesh holds of a tensor of `shape`."""
    offsets, sizes = [0] * len(shape), list(shape)
    for sbp, parts, index in zip(found, mesh_shape, coordinate, strict=True):
        if isinstance(sbp, Split):
            start, length = piece_bounds(sizes[sbp.dim], parts, index)
            offsets[sbp.dim] += start
            sizes[sbp.dim] = length
    return offsets, sizes
