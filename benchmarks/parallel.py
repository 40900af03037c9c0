"""The same data-parallel training step on two processes, every way there is: `python -m benchmarks.parallel`.

torchrun starts the processes, one thread each, over gloo. All contenders live in both of them, each with a model of its own, and take
turns: round after round, in rotating order, a few steps each, so that whatever else the machine does falls on all alike. A turn begins
with a barrier. Reported is the median of all timed steps on the first rank, and its ratio to the faster of the two that are not monoflow:
DistributedDataParallel in eager PyTorch, and compiled by torch.compile. All use AdamW(fused=True) and clip gradients.

The loss of the whole batch is compared over the first ten steps (to 1e-3 relative).

    python -m benchmarks.parallel [--workloads gpt-4M,gpt-30M,bert] [--rounds 10] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

import monoflow as mf
from benchmarks.contenders import COMPARED, TOLERANCE, Contender, Setup, adamw, disagreement
from benchmarks.report import console as make_console
from benchmarks.torchrun import on_ranks
from benchmarks.workloads import WORKLOADS, Step, training_step

RANKS = 2
WARM_UP = 3
BATCHES = 8


def _ddp(model: nn.Module, loss: Step) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return training_step(wrapped, adamw(model, fused=True), loss)


def _ddp_compiled(model: nn.Module, loss: Step) -> Step:
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model))
    return training_step(compiled, adamw(model, fused=True), loss)  # type: ignore[arg-type]


def _monoflow(backend: str) -> Setup:
    def setup(model: nn.Module, loss: Step) -> Step:
        optimizer = adamw(model, fused=True)
        graph = mf.graph(model, optimizer, placement=mf.placement.all("cpu"), backend=backend, progress=False)
        return graph(training_step(model, optimizer, loss))

    return setup


CONTENDERS: dict[str, Contender] = {
    "ddp": Contender("DDP", _ddp),
    "ddp-compile": Contender("torch.compile(DDP)", _ddp_compiled),
    "mf-aten": Contender("mf.graph aten", _monoflow("aten"), peer=False),
    "mf-inductor": Contender("mf.graph inductor", _monoflow("inductor"), peer=False),
}


@dataclass
class Result:
    """What one contender did on one workload, as the first rank saw it: seconds of each step, losses of the whole batch."""

    contender: str
    workload: str
    first_step: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)


class Runner:
    """One contender on this rank."""

    def __init__(self, name: str, workload: str) -> None:
        work = WORKLOADS[workload]
        self.result = Result(name, workload)
        self.contender = CONTENDERS[name]
        rank = dist.get_rank()
        self.batches = [tuple(t.chunk(RANKS)[rank] for t in work.batch(seed)) for seed in range(BATCHES)]
        model = work.build(seed=0)
        start = time.perf_counter()
        self.step = self.contender.setup(model, work.loss)
        self.run(1)
        self.result.first_step = time.perf_counter() - start
        self.run(WARM_UP - 1)

    def run(self, steps: int) -> list[float]:
        """Takes steps; returns the seconds of each."""
        seconds = []
        dist.barrier()
        for _ in range(steps):
            batch = self.batches[len(self.result.losses) % BATCHES]
            start = time.perf_counter()
            loss = self.step(*batch).detach()
            seconds.append(time.perf_counter() - start)
            self.result.losses.append(self.whole(loss))
        return seconds

    def whole(self, loss: Tensor) -> float:
        """The loss of the whole batch; outside of the timed part."""
        if self.contender.peer:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= RANKS
        return float(loss)


def worker(workload: str, contenders: Sequence[str], rounds: int, steps: int, file: str) -> None:
    """All contenders of a workload on this rank; the first rank writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runners = [Runner(name, workload) for name in contenders]
    for number in range(rounds):
        for index in range(len(runners)):
            runner = runners[(index + number) % len(runners)]
            runner.result.seconds += runner.run(steps)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps([asdict(r.result) for r in runners]))
    dist.barrier()
    dist.destroy_process_group()


def measure(workload: str, contenders: Sequence[str], rounds: int, steps: int) -> list[Result]:
    """Starts the processes and waits for their results. Raises RuntimeError with their last words where they fail."""
    arguments = ["--contenders", ",".join(contenders), "--rounds", str(rounds), "--steps", str(steps), "--worker", workload]
    return [Result(**one) for one in json.loads(on_ranks(RANKS, "benchmarks.parallel", *arguments))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="gpt-4M,gpt-30M,bert", help=f"comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    contenders = options.contenders.split(",")
    if options.worker:
        worker(options.worker[0], contenders, options.rounds, options.steps, options.worker[1])
        return 0
    console = make_console()
    wrong = 0
    for workload in options.workloads.split(","):
        with console.status(workload):
            results = measure(workload, contenders, options.rounds, options.steps)
        wrong += _show(workload, results, console)
    return int(wrong > 0)


def _show(workload: str, results: Sequence[Result], console: Any) -> bool:
    best = min((r.step for r in results if CONTENDERS[r.contender].peer), default=float("nan"))
    table = Table(title=f"{WORKLOADS[workload].about}, cut over {RANKS} processes of one thread", title_justify="left")
    for column in ("contender", "step ms", "x best peer", "first step s", "loss"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for r in results:
        label = CONTENDERS[r.contender].label
        table.add_row(label, f"{r.step * 1e3:.1f}", f"{r.step / best:.3f}", f"{r.first_step:.1f}", f"{r.losses[-1]:.6f}")
    console.print(table)
    worst = disagreement([r.losses for r in results])
    agree = worst <= TOLERANCE
    console.print(f"Losses of the first {COMPARED} steps {'agree' if agree else 'DISAGREE'}: {worst:.1e} (at most {TOLERANCE:.0e}).\n")
    return not agree


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
