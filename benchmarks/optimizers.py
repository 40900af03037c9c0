"""Every optimizer of `torch.optim`, eager against `mf.graph`: `python -m benchmarks.optimizers`.

Each variant of `benchmarks.optimizer_table` trains a small model for ten steps with a learning rate that a scheduler changes after each,
once in plain PyTorch and once per backend as a graph, from the same weights. Compared after the tenth step:

- every parameter, in ulp of the update, that is, of its largest change since any earlier step of eager training
  (`compare.update_ulps`), and relative to its largest element;
- the optimizer's state, and the learning rates, bitwise.

Backend "aten" must be bitwise equal where the optimizer is fused, and within 4 ulp of the update elsewhere; "inductor" within 1e-5
relative.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor, nn

import monoflow as mf
from benchmarks import compare
from benchmarks.optimizer_table import OPTIMIZERS
from benchmarks.report import console as make_console

STEPS = 10
ULPS = 4.0
RELATIVE = 1e-5


class Model(nn.Module):
    """Matrices, vectors, a 4-D filter and a scalar; one parameter is frozen and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(16, 12)
        self.out = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 4, 4) -> (batch, 3)."""
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.scale * self.out(torch.tanh(self.hidden(x))) + self.frozen


def make_model() -> Model:
    """The model with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randn(8, 3, generator=generator)


def rate(step: int) -> float:
    """What the learning rate is multiplied with: warm-up over three steps, then decay."""
    return min((step + 1) / 3, 1.0) * 0.9**step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backend: str | None = None) -> list[list[Tensor]]:
    """Ten steps, eagerly where `backend` is None. Returns the parameters as they were before each step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = mf.graph(model, optimizer, backend=backend)(step) if backend else step
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    path = []
    for number in range(STEPS):
        path.append([p.detach().clone() for p in model.parameters()])
        run(*batch(number))
        scheduler.step()
    return path


def farthest(parameter: Tensor, path: Sequence[Tensor]) -> Tensor:
    """The earlier value that is farthest from what the parameter is now."""
    return max(path, key=lambda earlier: float((parameter.detach() - earlier).abs().max()))


@dataclass
class Found:
    """How far a graph's ten steps came from eager's."""

    ulps: float = 0.0
    relative: float = 0.0
    parameters_equal: bool = True
    state_equal: bool = True
    error: str = ""


def compare_optimizer(name: str, backend: str) -> Found:
    """Train with optimizer `name` eagerly and as a graph."""
    make = OPTIMIZERS[name]
    eager = make_model()
    graph = copy.deepcopy(eager)
    eager_optimizer, graph_optimizer = make(eager.parameters()), make(graph.parameters())
    path = train(eager, eager_optimizer)
    try:
        train(graph, graph_optimizer, backend)
    except Exception as error:
        return Found(error=f"{type(error).__name__}: {error}")
    found = Found()
    for ours, theirs, earlier in zip(graph.parameters(), eager.parameters(), zip(*path, strict=True), strict=True):
        found.ulps = max(found.ulps, compare.update_ulps(ours, theirs, farthest(theirs, earlier)))
        found.relative = max(found.relative, compare.relative(ours, theirs))
        found.parameters_equal &= torch.equal(ours, theirs)
    found.state_equal = not compare.differing(compare.optimizer_state(graph_optimizer), compare.optimizer_state(eager_optimizer))
    for ours_group, theirs_group in zip(graph_optimizer.param_groups, eager_optimizer.param_groups, strict=True):
        found.state_equal &= float(ours_group["lr"]) == float(theirs_group["lr"])
    return found


def miss(name: str, backend: str, found: Found) -> str:
    """What bound was missed, or nothing."""
    if found.error:
        return found.error
    if backend == "inductor":
        return "" if found.relative <= RELATIVE else f"parameters are {found.relative:.1e} off, relative"
    if "fused" in name:
        return "" if found.parameters_equal and found.state_equal else "fused, but not bitwise equal"
    return "" if found.ulps <= ULPS else f"parameters are {found.ulps:.1f} ulp of the update off"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name has this in it, as in --only AdamW")
    parser.add_argument("--backends", default="aten,inductor", help="comma-separated (default aten,inductor)")
    options = parser.parse_args(arguments)
    backends = options.backends.split(",")
    names = [name for name in OPTIMIZERS if options.only in name]

    torch.set_num_threads(1)
    console = make_console()
    table = Table(title=f"{len(names)} optimizers, {STEPS} steps with a changing learning rate, mf.graph against eager PyTorch")
    table.add_column("optimizer")
    for backend in backends:
        for column in ("parameters", "state", "relative"):
            table.add_column(f"{backend}: {column}", justify="right")
    misses: list[str] = []
    with console.status("") as status:
        for name in names:
            cells = []
            for backend in backends:
                status.update(f"{name}, {backend}")
                found = compare_optimizer(name, backend)
                missed = miss(name, backend, found)
                if missed:
                    misses.append(f"{name}, {backend}: {missed}")
                color = "[red]" if missed else "[green]"
                if found.error:
                    cells += [f"{color}failed", "-", "-"]
                    continue
                cells.append(color + ("bitwise" if found.parameters_equal else f"{found.ulps:.2f} ulp"))
                cells += ["bitwise" if found.state_equal else "differs", f"{found.relative:.1e}"]
            table.add_row(name, *cells)
    console.print(table)
    for missed in misses:
        console.print(missed, markup=False, highlight=False)
    console.print(f"{len(names) * len(backends) - len(misses)} of {len(names) * len(backends)} runs meet their bound.")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
