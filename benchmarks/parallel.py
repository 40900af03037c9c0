"""The same data-parallel training step on two processes, every way there is: `python -m benchmarks.parallel`.

torchrun starts the processes, one thread each, over gloo; `benchmarks.rounds` says how the contenders take turns. Reported is the median
of all timed steps on the first rank, and its ratio to the faster of the two that are not monoflow: DistributedDataParallel in eager
PyTorch, and compiled by torch.compile. All use AdamW(fused=True) and clip gradients. Losses are compared to 1e-3 relative.

    python -m benchmarks.parallel [--workloads gpt-4M,gpt-30M,bert] [--rounds 10] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

import torch
from torch import nn

import monoflow as mf
from benchmarks.contenders import Contender, Setup, adamw
from benchmarks.report import console as make_console
from benchmarks.rounds import add_arguments, chosen, measure, show, works
from benchmarks.workloads import Step, training_step

RANKS = 2


def ddp(model: nn.Module, loss: Step) -> Step:
    """DistributedDataParallel, eager."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    return training_step(wrapped, adamw(model, fused=True), loss)


def _ddp_compiled(model: nn.Module, loss: Step) -> Step:
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model))
    return training_step(compiled, adamw(model, fused=True), loss)  # type: ignore[arg-type]


def monoflow(backend: str, zero: int = 0) -> Setup:
    """One graph over all ranks."""

    def setup(model: nn.Module, loss: Step) -> Step:
        optimizer = adamw(model, fused=True)
        graph = mf.graph(model, optimizer, placement=mf.placement.all("cpu"), zero=zero, backend=backend, progress=False)
        return graph(training_step(model, optimizer, loss))

    return setup


CONTENDERS: dict[str, Contender] = {
    "ddp": Contender("DDP", ddp),
    "ddp-compile": Contender("torch.compile(DDP)", _ddp_compiled),
    "mf-aten": Contender("mf.graph aten", monoflow("aten"), peer=False),
    "mf-inductor": Contender("mf.graph inductor", monoflow("inductor"), peer=False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, CONTENDERS, "gpt-4M,gpt-30M,bert")
    options = parser.parse_args(arguments)
    contenders = chosen(CONTENDERS, options.contenders)
    if works(options, contenders):
        return 0
    console = make_console()
    wrong = 0
    for workload in options.workloads.split(","):
        with console.status(workload):
            results = measure("benchmarks.parallel", RANKS, workload, list(contenders), options.rounds, options.steps)
        wrong += show(RANKS, workload, results, CONTENDERS, console)
    return int(wrong > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
