"""Between the user's tensors and what a rank's graph computes with: global tensors are taken apart, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monoflow.global_tensor import to_placements
from monoflow.placement import Placement
from monoflow.sbp import Broadcast, Layout


def local_piece(value: Any) -> Any:
    """This rank's piece of a global tensor; anything else as it is."""
    return value._local_tensor.detach() if isinstance(value, DTensor) else value


class GlobalOutput:
    """Makes the value of an output from this rank's piece: a plain tensor where it is B on every mesh dimension, else a global one."""

    def __init__(self, placement: Placement, found: Layout, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self._mesh = placement.mesh()
        self._placements = to_placements(found)
        self._shape, self._stride = shape, stride

    def __call__(self, piece: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(piece, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride)


def is_whole(found: Layout | None) -> bool:
    """True for what every rank has whole: B everywhere, or no tensor."""
    return found is None or all(isinstance(s, Broadcast) for s in found)
