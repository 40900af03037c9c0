"""ZeRO: bytes sent, bytes held, peak memory and time of a step, against the formulas and against PyTorch: `python -m benchmarks.zero`.

bytes    What a rank sends in a step, counted at the collectives, over what ZeRO's paper says, for 2 and 4 real processes and for 64 and
         1,024 simulated ranks. P are the bytes of the parameters in float32: 2(N-1)/N P at stages 0 to 2, 3(N-1)/N P at stage 3.
memory   What a rank holds between steps, over the formula, and the peak during a step: predicted by the plan, and counted in real
         processes by a dispatch mode that follows every storage; FSDP2 (`fully_shard` of each block) counted in the same way.
time     Milliseconds per step, medians, in one run (`benchmarks.rounds`): DDP, DDP with ZeroRedundancyOptimizer, FSDP2, monoflow.

AdamW(fused=True) everywhere, gradients clipped; monoflow's memory is that of backend "aten", whose every tensor can be counted.

    python -m benchmarks.zero [--parts bytes,memory,time] [--workloads gpt-30M,gpt-120M] [--ranks 2,4] [--rounds 6]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

import monoflow as mf
from benchmarks.contenders import LEARNING_RATE, Contender, adamw
from benchmarks.parallel import ddp, monoflow
from benchmarks.report import console as make_console
from benchmarks.rounds import add_arguments, chosen, measure, show, works
from benchmarks.torchrun import on_ranks
from benchmarks.workloads import WORKLOADS, Step, training_step
from monoflow.run.track import MemoryTracker

STAGES = (0, 1, 2, 3)
SIMULATED = (64, 1024)


def _zero_redundancy(model: nn.Module, loss: Step) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return training_step(wrapped, optimizer, loss)


def _shard_blocks(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)


def _fsdp(model: nn.Module, loss: Step) -> Step:
    _shard_blocks(model)
    return training_step(model, adamw(model, fused=True), loss)


CONTENDERS: dict[str, Contender] = {
    "ddp": Contender("DDP", ddp),
    "zero-redundancy": Contender("DDP + ZeroRedundancyOptimizer", _zero_redundancy),
    "fsdp2": Contender("FSDP2", _fsdp),
    **{f"zero-{stage}": Contender(f"mf.graph zero={stage}", monoflow("auto", stage), peer=False) for stage in STAGES[1:]},
}


# Bytes


def _formula(stage: int, ranks: int) -> float:
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks


def planned(workload: str, stage: int, ranks: int) -> float:
    """Bytes sent by a rank in a step, over those of the parameters, as planned for simulated ranks."""
    work = WORKLOADS[workload]
    batch = [torch.empty((ranks, *t.shape[1:]), dtype=t.dtype) for t in work.batch(0)]
    model = work.build()
    with mf.simulate(ranks):
        plan = _step(model, work.loss, stage).plan(*batch)
    return float(plan.bytes_sent) / _size(model)


def _step(model: nn.Module, loss: Step, stage: int) -> Any:
    optimizer = adamw(model, fused=True)
    graph = mf.graph(model, optimizer, placement=mf.placement.all("cpu"), zero=stage, backend="aten", progress=False)
    return graph(training_step(model, optimizer, loss))


def _size(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends, by the collectives that run: twice (N-1)/N of what is all-reduced, else once of the larger side."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            size = max(t.numel() * t.element_size() for t in (args[0], result))
            self.sent += size * (self.ranks - 1) / self.ranks * (2 if "all_reduce" in str(func) else 1)
        return result


# Memory


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's pieces of parameters, gradients and optimizer state."""
    found = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    found += [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(t, "_local_tensor", t) for t in found]


def counted(workload: str) -> dict[str, dict[str, float]]:
    """On this rank of a real job: for each stage, and FSDP2, what was sent, held, predicted and measured."""
    work, ranks, rank = WORKLOADS[workload], dist.get_world_size(), dist.get_rank()
    batch = [t.chunk(ranks)[rank] for t in work.batch(0)]
    found: dict[str, dict[str, float]] = {}
    for stage in STAGES:
        model = work.build()
        size = _size(model)
        step = _step(model, work.loss, stage)
        step(*batch)
        with SentBytes(ranks) as counter:
            step(*batch)
        plan = step.measure(*batch)
        held = sum(t.numel() * t.element_size() for t in _held(model, step.stateful()["optimizer"]))
        found[str(stage)] = {"size": size, "sent": counter.sent, "held": held, "predicted": plan.memory.peak, "measured": plan.measured}
        del model, step
    model = work.build()
    _shard_blocks(model)
    optimizer = adamw(model, fused=True)
    step = training_step(model, optimizer, work.loss)
    for _ in range(2):
        step(*batch)
    with MemoryTracker([*_held(model, optimizer), *batch]) as tracker:
        step(*batch)
    found["fsdp2"] = {"size": size, "measured": tracker.peak}
    return found


def _held_formula(stage: int, ranks: int) -> float:
    """Of parameters and Adam's two moments, in units of the parameters; gradients end with the step."""
    return 3.0 if stage == 0 else 1 + 2 / ranks if stage < 3 else 3 / ranks


def show_counted(workload: str, ranks: int, found: dict[str, dict[str, float]], console: Console) -> None:
    """The table of bytes and memory of a real job."""
    table = Table(title=f"{WORKLOADS[workload].about}, {ranks} processes: a rank's bytes", title_justify="left")
    for name in (
        "",
        "sent / P",
        "over formula",
        "held / P",
        "over formula",
        "peak MB predicted",
        "measured",
        "over predicted",
        "over FSDP2",
    ):
        table.add_column(name, justify="right" if name else "left")
    for stage in STAGES:
        one = found[str(stage)]
        sent, held = one["sent"] / one["size"], one["held"] / one["size"]
        table.add_row(
            f"zero={stage}",
            f"{sent:.4f}",
            f"{sent / _formula(stage, ranks):.4f}",
            f"{held:.4f}",
            f"{held / _held_formula(stage, ranks):.4f}",
            f"{one['predicted'] / 1e6:.1f}",
            f"{one['measured'] / 1e6:.1f}",
            f"{one['measured'] / one['predicted']:.4f}",
            f"{one['measured'] / found['fsdp2']['measured']:.3f}",
        )
    table.add_row("FSDP2", "", "", "", "", "", f"{found['fsdp2']['measured'] / 1e6:.1f}", "", "1.000")
    console.print(table)


def show_planned(workload: str, console: Console) -> None:
    """The table of bytes for ranks that there are not."""
    table = Table(title=f"{WORKLOADS[workload].about}, simulated ranks: bytes sent by a rank", title_justify="left")
    columns = ("sent / P", "over formula", "held / P", "over formula", "peak MB predicted", "measured", "over predicted", "over FSDP2")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for stage in STAGES:
        cells = []
        for ranks in SIMULATED:
            sent = planned(workload, stage, ranks)
            cells += [f"{sent:.4f}", f"{sent / _formula(stage, ranks):.4f}"]
        table.add_row(f"zero={stage}", *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, CONTENDERS, "gpt-30M,gpt-120M", rounds=6)
    parser.add_argument("--parts", default="bytes,memory,time")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--count", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    contenders = chosen(CONTENDERS, options.contenders)
    if works(options, contenders):
        return 0
    if options.count:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = counted(options.count[0])
        if dist.get_rank() == 0:
            Path(options.count[1]).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
        return 0
    console, parts, wrong = make_console(), options.parts.split(","), 0
    for workload in options.workloads.split(","):
        if "bytes" in parts:
            show_planned(workload, console)
        for ranks in map(int, options.ranks.split(",")):
            if "memory" in parts or "bytes" in parts:
                show_counted(workload, ranks, json.loads(on_ranks(ranks, "benchmarks.zero", "--count", workload)), console)
            if "time" in parts:
                results = measure("benchmarks.zero", ranks, workload, list(contenders), options.rounds, options.steps)
                wrong += show(ranks, workload, results, CONTENDERS, console)
    return int(wrong > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
