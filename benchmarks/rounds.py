"""Contenders on several processes, taking turns: round after round, in rotating order, a few steps each.

All contenders live in every process, each with a model of its own, so that whatever else the machine does falls on all alike. A turn begins
with a barrier. Timed is each step on the first rank; the loss of the whole batch is compared over the first ten steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.contenders import COMPARED, TOLERANCE, Contender, disagreement
from benchmarks.torchrun import on_ranks
from benchmarks.workloads import WORKLOADS

WARM_UP = 3
BATCHES = 8

Contenders = Mapping[str, Contender]


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

    def __init__(self, name: str, contender: Contender, workload: str) -> None:
        work = WORKLOADS[workload]
        self.result = Result(name, workload)
        self.contender = contender
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.batches = [tuple(t.chunk(self.ranks)[rank] for t in work.batch(seed)) for seed in range(BATCHES)]
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
            loss /= self.ranks
        return float(loss)


def works(options: argparse.Namespace, contenders: Contenders) -> bool:
    """True in a process that `measure` has started, after it has done its work."""
    if options.worker:
        workload, file = options.worker
        _worker(workload, contenders, options.rounds, options.steps, file)
    return bool(options.worker)


def _worker(workload: str, contenders: Contenders, rounds: int, steps: int, file: str) -> None:
    """All contenders of a workload on this rank; the first rank writes the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runners = [Runner(name, contender, workload) for name, contender in contenders.items()]
    for number in range(rounds):
        for index in range(len(runners)):
            runner = runners[(index + number) % len(runners)]
            runner.result.seconds += runner.run(steps)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps([asdict(r.result) for r in runners]))
    dist.barrier()
    dist.destroy_process_group()


def measure(module: str, ranks: int, workload: str, contenders: Sequence[str], rounds: int, steps: int) -> list[Result]:
    """Starts the processes and waits for their results. Raises RuntimeError with their last words where they fail.

    `module` is the benchmark, which hands its options on to `works`.
    """
    arguments = ["--contenders", ",".join(contenders), "--rounds", str(rounds), "--steps", str(steps), "--worker", workload]
    return [Result(**one) for one in json.loads(on_ranks(ranks, module, *arguments))]


def add_arguments(parser: argparse.ArgumentParser, contenders: Contenders, workloads: str, rounds: int = 10) -> None:
    """The options that benchmarks in rounds have in common."""
    parser.add_argument("--workloads", default=workloads, help=f"comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--contenders", default=",".join(contenders), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--worker", nargs=2, metavar=("WORKLOAD", "FILE"), help=argparse.SUPPRESS)


def show(ranks: int, workload: str, results: Sequence[Result], contenders: Contenders, console: Console) -> bool:
    """Prints a table, with ratios to the fastest peer. True where losses disagree."""
    best = min((r.step for r in results if contenders[r.contender].peer), default=float("nan"))
    table = Table(title=f"{WORKLOADS[workload].about}, cut over {ranks} processes of one thread", title_justify="left")
    for column in ("contender", "step ms", "x best peer", "first step s", "loss"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for r in results:
        label = contenders[r.contender].label
        table.add_row(label, f"{r.step * 1e3:.1f}", f"{r.step / best:.3f}", f"{r.first_step:.1f}", f"{r.losses[-1]:.6f}")
    console.print(table)
    worst = disagreement([r.losses for r in results])
    agree = worst <= TOLERANCE
    console.print(f"Losses of the first {COMPARED} steps {'agree' if agree else 'DISAGREE'}: {worst:.1e} (at most {TOLERANCE:.0e}).\n")
    return not agree


def chosen(contenders: Contenders, names: str) -> dict[str, Any]:
    """Those of the comma-separated names."""
    return {name: contenders[name] for name in names.split(",")}
