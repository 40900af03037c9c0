"""Which ranks there are: the processes of a job, or ranks simulated inside this one."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from monoflow.errors import PlacementError


@dataclass(frozen=True, slots=True)
class World:
    """`size` ranks. `rank` is this process's own; None where all of them are simulated in this process, on `device_type`."""

    size: int
    rank: int | None
    device_type: str | None = None


_simulated: contextvars.ContextVar[World | None] = contextvars.ContextVar("monoflow_world", default=None)


@contextlib.contextmanager
def simulate(world_size: int, device: str = "cpu") -> Iterator[World]:
    """Ranks without processes: inside the `with` block placements name `world_size` ranks that all live in this process.

    A step whose placement is simulated is called once for all ranks: plain tensors given to it are whole (the batch of all ranks), and so
    are the parameters; its ranks run in lockstep, op by op. Plans (`step.plan`) take any number of ranks; running takes memory for each.
    Placements inside are of type `device`.

    Raises: PlacementError for a number of ranks below 1.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise PlacementError(f"mf.simulate takes a number of ranks of at least 1, got {world_size!r}")
    world = World(world_size, None, device)
    token = _simulated.set(world)
    try:
        yield world
    finally:
        _simulated.reset(token)


def current_world() -> World:
    """The simulated world where there is one, else the job's: as torch.distributed knows it, or torchrun's environment says."""
    simulated = _simulated.get()
    if simulated is not None:
        return simulated
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_world_size(), dist.get_rank())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    return World(1, 0)


def start_processes(device_type: str) -> None:
    """Joins the job's process group if that has not been done: gloo for CPU tensors (and for agreements), NCCL for CUDA tensors.

    Without torchrun's environment a group of one process is made, so that one script serves both.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
