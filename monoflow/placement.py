"""Where a tensor lives: a device type and a mesh of ranks (OneFlow's placement, PyTorch's DeviceMesh)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from monoflow.errors import PlacementError
from monoflow.world import current_world, start_processes


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """A mesh of ranks: `shape` and `ranks` in row-major order, optionally a name for each dimension.

    `mf.placement("cpu", [0, 1])` is a line of two ranks, `mf.placement("cuda", [[0, 1], [2, 3]], names=("dp", "tp"))` a mesh of 2 x 2.
    Equal placements are equal and hash alike.

    Raises: PlacementError for ranks that do not exist, are named twice or do not form a mesh, and for unknown device types.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None

    def __init__(self, device_type: str, ranks: Any, names: Sequence[str] | None = None) -> None:
        shape, flat = _mesh(ranks)
        _check_device(device_type)
        _check_ranks(flat)
        if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
            raise PlacementError(f"names {tuple(names)!r} do not fit a mesh of {len(shape)} dimension(s): one name each, all different")
        object.__setattr__(self, "device_type", device_type)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "ranks", flat)
        object.__setattr__(self, "names", None if names is None else tuple(names))

    @classmethod
    def all(cls, device_type: str) -> Placement:
        """Every rank of the job in one line."""
        return cls(device_type, range(current_world().size))

    @staticmethod
    def of(tensor: Any) -> Placement:
        """The placement of a global tensor. Raises PlacementError for a plain one."""
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            raise PlacementError(f"a plain {type(tensor).__name__} has no placement: mf.distribute or mf.to_global makes global tensors")
        return _placement_of(mesh)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def dimension(self, name: str | int) -> int:
        """The number of a mesh dimension given by name or number. Raises PlacementError."""
        if isinstance(name, int) and -self.ndim <= name < self.ndim:
            return name % self.ndim
        if self.names is not None and name in self.names:
            return self.names.index(str(name))
        raise PlacementError(f"{self} has no dimension {name!r}")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where in the mesh a rank is, None for a rank outside of it."""
        if rank not in self.ranks:
            return None
        index, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, place = divmod(index, size)
            found.append(place)
        return tuple(reversed(found))

    def group(self, rank: int, dim: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in mesh dimension `dim` only, itself among them, in order."""
        at = self.coordinate(rank)
        if at is None:
            raise PlacementError(f"rank {rank} is not part of {self}")
        stride = math.prod(self.shape[dim + 1 :])
        first = self.ranks.index(rank) - at[dim] * stride
        return tuple(self.ranks[first + i * stride] for i in range(self.shape[dim]))

    def mesh(self) -> DeviceMesh:
        """PyTorch's mesh of it; joins the job's process group if that has not been done. Collective: every rank of the job calls it."""
        start_processes(self.device_type)
        return _device_mesh(self)

    def __str__(self) -> str:
        nested = _nested(list(self.ranks), self.shape)
        names = "" if self.names is None else f", names={self.names!r}"
        return f"mf.placement({self.device_type!r}, {nested}{names})"

    __repr__ = __str__


def _nested(flat: list[int], shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return flat
    step = len(flat) // shape[0]
    return [_nested(flat[i : i + step], shape[1:]) for i in range(0, len(flat), step)]


def _mesh(ranks: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ranks of nested lists (or an array, a tensor, a range)."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        return (), (ranks,)
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise PlacementError(f"ranks are whole numbers in (nested) lists, got {ranks!r}")
    parts = [_mesh(item) for item in ranks]
    if not parts or len({shape for shape, _ in parts}) != 1:
        raise PlacementError(f"ranks must form a full mesh: every list of a level of the same length, none empty; got {ranks!r}")
    return (len(parts), *parts[0][0]), tuple(itertools.chain.from_iterable(flat for _, flat in parts))


DEVICE_TYPES = ("cpu", "cuda")


def _check_device(device_type: str) -> None:
    if device_type not in DEVICE_TYPES:
        raise PlacementError(f"unknown device type {device_type!r}: choose {' or '.join(map(repr, DEVICE_TYPES))}")
    simulated = current_world().device_type
    if simulated not in (None, device_type):
        raise PlacementError(
            f"the simulated ranks are of type {simulated!r}, not {device_type!r}: mf.simulate(..., device={device_type!r})"
        )


def _check_ranks(flat: tuple[int, ...]) -> None:
    size = current_world().size
    twice = sorted({r for r in flat if flat.count(r) > 1}) if len(set(flat)) != len(flat) else []
    if twice:
        raise PlacementError(f"rank(s) {twice} are named twice")
    missing = sorted(r for r in flat if not 0 <= r < size)
    if missing:
        raise PlacementError(f"rank(s) {missing} do not exist: the job has ranks 0 to {size - 1}")


@functools.lru_cache(maxsize=64)
def _device_mesh(placement: Placement) -> DeviceMesh:
    mesh = _nested(list(placement.ranks), placement.shape)
    return DeviceMesh(placement.device_type, mesh, mesh_dim_names=placement.names)


def _placement_of(mesh: DeviceMesh) -> Placement:
    return Placement(mesh.device_type, mesh.mesh, mesh.mesh_dim_names)
