"""Seventeen Hugging Face architectures, each trained under `mf.graph` against plain PyTorch: `python -m benchmarks.models`.

Every architecture of `benchmarks.architectures` takes three steps (forward, loss, backward, clipping, AdamW; dropout on) eagerly and
as a graph, from copies of the same model, with the same seed before each step. Compared after each step:

backend "aten"
    Loss and every gradient, bitwise, with either of two optimizers. With AdamW(fused=True): every parameter, buffer and tensor of the
    optimizer's state, bitwise. With AdamW as it is by default: every parameter, to 4 ulp of the update (`compare.update_ulps`).
backend "inductor", with AdamW(fused=True)
    Loss and buffers to 1e-5 relative, every gradient to 1e-5 of its largest element (or of 1e-4 of the model's largest gradient, where
    that is more: the bias of an attention's keys has a gradient of zero, and what is computed for it is nothing but rounding).
    Every parameter to 1e-5 of its largest element, against eager AdamW fed with the graph's own gradients: Adam divides a gradient by
    its size, so that an element whose gradient is only rounding moves by a whole step in a direction that rounding decides.

The last two are about one step, so each step there starts from the eager run's state. All of it runs on one thread: with more, eager
PyTorch is not bitwise equal to itself (the gradient of indexing, as in a mixture of experts, adds up in the order of the threads).

Also shown: the size of the graph, seconds of capture, and the share of its ops that know the user's line, which must be all of them.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, fx, nn

import monoflow as mf
from benchmarks import compare
from benchmarks.architectures import ARCHITECTURES, Architecture
from benchmarks.report import console as make_console

STEPS = 3
LEARNING_RATE = 1e-3
ULPS = 4.0
RELATIVE = 1e-5
SMALL_GRADIENT = 1e-4

Step = Callable[..., Tensor]


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step under test. Gradients are dropped at its beginning, so that they can be compared after it."""

    def train(**batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return train


@dataclass
class Pair:
    """The same training run twice: eager, and as a graph."""

    architecture: Architecture
    fused: bool
    backend: str
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    graph_model: nn.Module = field(init=False)
    graph_optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.architecture.build(seed=0)
        self.graph_model = copy.deepcopy(self.model)
        options: dict[str, Any] = {"fused": True} if self.fused else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, **options)
        self.graph_optimizer = torch.optim.AdamW(self.graph_model.parameters(), lr=LEARNING_RATE, **options)
        self.eager = training_step(self.model, self.optimizer)
        graph = mf.graph(self.graph_model, self.graph_optimizer, backend=self.backend)
        self.graph = graph(training_step(self.graph_model, self.graph_optimizer))

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Step `number` of both, with the same batch and seed: their losses, the graph's first."""
        losses = []
        for step in (self.graph, self.eager):
            torch.manual_seed(number)
            losses.append(step(**self.architecture.batch(seed=number)).detach())
        return losses[0], losses[1]

    def align(self) -> None:
        """Set the graph's parameters, buffers and optimizer state to the eager ones, in place."""
        align(self.graph_model, self.graph_optimizer, self.model, self.optimizer)


@torch.no_grad()
def align(model: nn.Module, optimizer: torch.optim.Optimizer, like: nn.Module, like_optimizer: torch.optim.Optimizer) -> None:
    """Give a model and its optimizer the values of another pair, in place."""
    for ours, theirs in zip([*model.parameters(), *model.buffers()], [*like.parameters(), *like.buffers()], strict=True):
        ours.copy_(theirs)
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        for name, value in like_optimizer.state.get(theirs, {}).items():
            optimizer.state[ours][name].copy_(value)


@dataclass
class Row:
    """What was found for one architecture. None: not measured."""

    name: str
    nodes: int = 0
    calls: int = 0
    capture_seconds: float = 0.0
    without_source: list[str] = field(default_factory=list)
    loss_equal: bool | None = None
    gradients_equal: bool | None = None
    fused_equal: bool | None = None
    plain_equal: bool | None = None
    plain_ulps: float | None = None
    inductor: float | None = None
    misses: list[str] = field(default_factory=list)

    def check(self, right: bool, what: str) -> bool:
        """Note a miss unless `right`."""
        if not right and what not in self.misses:
            self.misses.append(what)
        return right


def without_source(graph: fx.Graph) -> list[str]:
    """The call nodes that do not lead to a line of the user's code."""
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    return [f"{n.name} ({n.target})" for n in calls if "op" not in n.meta or not n.meta["op"].source or n.meta["op"].user is None]


def examine_graph(row: Row, pair: Pair) -> None:
    """Capture the step without running it: seconds, nodes, and their sources."""
    batch = pair.architecture.batch(seed=0)
    start = time.perf_counter()
    graph = pair.graph.graph_for(**batch).graph  # type: ignore[attr-defined]
    row.capture_seconds = time.perf_counter() - start
    row.nodes, row.calls = len(graph.nodes), sum(node.op.startswith("call_") for node in graph.nodes)
    row.without_source = without_source(graph)
    row.check(not row.without_source, f"{len(row.without_source)} ops without a source: {', '.join(row.without_source[:3])}")


def _losses_and_gradients(row: Row, pair: Pair, number: int, kind: str) -> None:
    """Run one step of both and compare bitwise what the forward and backward computed."""
    ours, theirs = pair.step(number)
    equal = row.check(torch.equal(ours, theirs), f"{kind}, step {number}: loss {float(ours)!r}, eager {float(theirs)!r}")
    row.loss_equal = equal and row.loss_equal is not False
    wrong = compare.differing(compare.gradients(pair.graph_model), compare.gradients(pair.model))
    equal = row.check(not wrong, f"{kind}, step {number}: {len(wrong)} gradients differ: {', '.join(wrong[:3])}")
    row.gradients_equal = equal and row.gradients_equal is not False


def compare_fused(row: Row, pair: Pair) -> None:
    """Three steps on "aten" with the fused optimizer: everything bitwise equal."""
    for number in range(STEPS):
        _losses_and_gradients(row, pair, number, "fused")
        wrong = compare.differing(compare.tensors(pair.graph_model), compare.tensors(pair.model))
        wrong += compare.differing(compare.optimizer_state(pair.graph_optimizer), compare.optimizer_state(pair.optimizer))
        equal = row.check(not wrong, f"fused, step {number}: {len(wrong)} parameters or states differ: {', '.join(wrong[:3])}")
        row.fused_equal = equal and row.fused_equal is not False


def compare_plain(row: Row, pair: Pair) -> None:
    """Three steps on "aten" with the default optimizer, each from the same state: gradients bitwise, parameters to 4 ulp of the update."""
    row.plain_ulps, row.plain_equal = 0.0, True
    for number in range(STEPS):
        before = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
        _losses_and_gradients(row, pair, number, "plain")
        for (name, ours), theirs in zip(pair.graph_model.named_parameters(), pair.model.parameters(), strict=True):
            ulps = compare.update_ulps(ours, theirs, before[name])
            row.check(ulps <= ULPS, f"plain, step {number}: {name} is {ulps:.1f} ulp of the update off")
            row.plain_ulps = max(row.plain_ulps, ulps)
            row.plain_equal = row.plain_equal and torch.equal(ours, theirs)
        pair.align()


def compare_inductor(row: Row, pair: Pair) -> None:
    """Three steps on "inductor" with the fused optimizer, each from the same state: all of it to 1e-5, as the module says."""
    replay = copy.deepcopy(pair.model)
    replay_optimizer = torch.optim.AdamW(replay.parameters(), lr=LEARNING_RATE, fused=True)
    worst = 0.0
    for number in range(STEPS):
        ours, theirs = pair.step(number)
        found = {"loss": compare.relative(ours, theirs)}

        expected = compare.gradients(pair.model)
        floor = SMALL_GRADIENT * compare.largest(expected)
        for name, gradient in compare.gradients(pair.graph_model).items():
            found[f"gradient of {name}"] = compare.relative(gradient, expected[name], floor)

        for parameter, other in zip(replay.parameters(), pair.graph_model.parameters(), strict=True):
            parameter.grad = None if other.grad is None else other.grad.clone()
        replay_optimizer.step()
        for (name, ours), theirs in zip(pair.graph_model.named_parameters(), replay.parameters(), strict=True):
            found[name] = compare.relative(ours, theirs)
        for (name, ours), theirs in zip(pair.graph_model.named_buffers(), pair.model.buffers(), strict=True):
            found[name] = compare.relative(ours, theirs)

        for name, difference in found.items():
            row.check(difference <= RELATIVE, f"inductor, step {number}: {name} is {difference:.1e} off")
        worst = max(worst, *found.values())
        pair.align()
        align(replay, replay_optimizer, pair.model, pair.optimizer)
    row.inductor = worst


def examine(name: str, backends: Sequence[str]) -> Row:
    """All of the comparisons of one architecture. An exception is a miss."""
    row = Row(name)
    architecture = ARCHITECTURES[name]
    try:
        if "aten" in backends:
            pair = Pair(architecture, fused=True, backend="aten")
            examine_graph(row, pair)
            compare_fused(row, pair)
            compare_plain(row, Pair(architecture, fused=False, backend="aten"))
        if "inductor" in backends:
            pair = Pair(architecture, fused=True, backend="inductor")
            examine_graph(row, pair)
            compare_inductor(row, pair)
    except Exception as error:
        row.misses.append(f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}")
    return row


def _yes(value: bool | None) -> str:
    return "-" if value is None else "[green]yes" if value else "[red]NO"


def _number(value: float | None, limit: float, form: str) -> str:
    return "-" if value is None else f"{'[green]' if value <= limit else '[red]'}{value:{form}}"


def table(rows: Sequence[Row]) -> Table:
    """A line per architecture."""
    out = Table(
        title=f"{len(rows)} architectures, {STEPS} training steps with dropout, mf.graph against eager PyTorch", title_justify="left"
    )
    out.add_column("model")
    columns = (
        "nodes",
        "capture s",
        "with source",
        "loss =",
        "gradients =",
        "fused AdamW =",
        f"AdamW ulp (max {ULPS:.0f})",
        f"inductor rel (max {RELATIVE:.0e})",
    )
    for column in columns:
        out.add_column(column, justify="right")
    for row in rows:
        share = 100 * (1 - len(row.without_source) / row.calls) if row.calls else 0.0
        out.add_row(
            row.name,
            str(row.nodes),
            f"{row.capture_seconds:.2f}",
            f"{'[red]' if row.without_source or not row.calls else '[green]'}{share:.4g} %",
            _yes(row.loss_equal),
            _yes(row.gradients_equal),
            _yes(row.fused_equal),
            "[green]bitwise" if row.plain_equal else _number(row.plain_ulps, ULPS, ".2f"),
            _number(row.inductor, RELATIVE, ".1e"),
        )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--backends", default="aten,inductor", help="comma-separated (default aten,inductor)")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(ARCHITECTURES)
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ARCHITECTURES)}")

    torch.set_num_threads(1)
    console = make_console()
    rows = []
    with console.status("") as status:
        for name in names:
            status.update(name)
            rows.append(examine(name, options.backends.split(",")))
    console.print(table(rows))
    for row in rows:
        for miss in row.misses:
            console.print(f"{row.name}: {miss}", markup=False, highlight=False)
    missed = sum(bool(row.misses) for row in rows)
    console.print(f"{len(rows) - missed} of {len(rows)} architectures meet every bound.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
