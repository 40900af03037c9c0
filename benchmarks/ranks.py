"""Training over real processes against one device: `python -m benchmarks.ranks`.

Every architecture of `benchmarks.architectures`, and a GPT, an MLP and a residual network of our own, take three steps (forward, loss,
backward, clipping, SGD with momentum; dropout on) on one device in plain PyTorch, and over the gloo processes that torchrun starts:

dp     the batch cut over all ranks
tp     the weights cut over all ranks (Megatron's pattern), the batch whole
2x2    both, on four ranks

Every rank but the first starts from other weights and another seed: those of the first count. Compared on the first rank after each step,
relative to the largest element of each tensor (of gradients and parameters, to 1e-4 of the model's largest gradient where that is more:
the bias of an attention's keys has a gradient of zero, and what is computed for it is nothing but rounding): the loss, every gradient,
every parameter and buffer. Bounds: 1e-5 in float32, 1e-12 in float64. (transformers calls `.float()` before losses and norms, which in
float64 would round what is compared to float32; there `.float()` is made to leave it as it is, on one device as over ranks.)

    python -m benchmarks.ranks [--only gpt2,llama] [--ranks 2,4] [--dtypes float32,float64] [--backend aten]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor, nn

import monoflow as mf
from benchmarks import compare
from benchmarks.architectures import ARCHITECTURES
from benchmarks.report import console as make_console
from benchmarks.small_models import MODELS, TENSOR_PARALLEL
from benchmarks.small_models import batch as small_batch
from benchmarks.torchrun import on_ranks

STEPS = 3
ROWS = 4
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
SMALL_GRADIENT = 1e-4

Layout = Mapping[str, list[str]]
COLUMN, ROW = ["B", "S(0)"], ["B", "S(1)"]

TENSOR_PARALLEL_LAYOUTS: dict[str, Layout] = {
    **{f"our {name}": layout for name, layout in TENSOR_PARALLEL.items() if name == "gpt"},
    "llama": {
        "*.[qkv]_proj.weight": COLUMN,
        "*.o_proj.weight": ROW,
        "*.gate_proj.weight": COLUMN,
        "*.up_proj.weight": COLUMN,
        "*.down_proj.weight": ROW,
        "lm_head.weight": COLUMN,
        "*.embed_tokens.weight": COLUMN,
    },
    "bert": {
        "*.attention.self.*": COLUMN,
        "*.attention.output.dense.weight": ROW,
        "*.intermediate.dense.*": COLUMN,
        "*[0-9].output.dense.weight": ROW,
        "*.word_embeddings.weight": COLUMN,
    },
    "t5": {"*Attention.[qkv].weight": COLUMN, "*Attention.o.weight": ROW, "*.wi.weight": COLUMN, "*.wo.weight": ROW},
}
"""Name -> how its weights lie on a mesh of data by tensor parallel ranks."""


@dataclass(frozen=True)
class Case:
    """A model, how it is laid out, and over how many ranks."""

    name: str
    mode: str
    ranks: int
    dtype: str

    @property
    def mesh(self) -> Any:
        ranks = list(range(self.ranks))
        return {"dp": ranks, "tp": [ranks], "2x2": [ranks[:2], ranks[2:]]}[self.mode]

    @property
    def layout(self) -> Layout:
        return {} if self.mode == "dp" else TENSOR_PARALLEL_LAYOUTS[self.name]


@dataclass
class Found:
    """The largest relative differences of a case over all steps, and the seconds it took."""

    case: Case
    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    where: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and max(self.loss, self.gradient, self.parameter) <= BOUNDS[self.case.dtype]


def cases(names: Sequence[str], ranks: int, dtype: str) -> Iterator[Case]:
    """Data parallel for every model, and the others for those that have a layout."""
    for name in names:
        modes = ["dp"]
        if name in TENSOR_PARALLEL_LAYOUTS:
            modes += ["tp", "2x2"] if ranks == 4 else ["tp"]
        for mode in modes:
            yield Case(name, mode, ranks, dtype)


NAMES = [*ARCHITECTURES, *(f"our {name}" for name in MODELS)]


def build(name: str, seed: int, dtype: torch.dtype) -> nn.Module:
    """A model in training mode, by name."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].build(seed).to(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name.removeprefix("our ")]().to(dtype)


def whole_batch(name: str, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch of ROWS rows: keyword arguments of the model."""
    if name in ARCHITECTURES:
        parts = [ARCHITECTURES[name].batch(seed * 100 + i) for i in range(ROWS // 2)]
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    else:
        x, y = small_batch(name.removeprefix("our "), ROWS)
        joined = {"x": x.roll(seed, 0), "y": y.roll(seed, 0)}
    return {key: t.to(dtype) if t.is_floating_point() else t for key, t in joined.items()}


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> Callable[..., Tensor]:
    """The step under test. Gradients are dropped at its beginning, so that they can be compared after it."""

    def train(**batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["x"], batch["y"]) if ours else model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return train


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _note(found: Found, what: str, name: str, difference: float) -> None:
    if difference > getattr(found, what):
        setattr(found, what, difference)
        found.where = f"{what} {name}"


def run(case: Case, backend: str) -> Found:
    """Three steps of a case on this rank; the first rank has the reference beside it."""
    dtype = getattr(torch, case.dtype)
    found = Found(case)
    rank = torch.distributed.get_rank()
    model = build(case.name, seed=rank, dtype=dtype)
    optimizer = make_optimizer(model)
    placement = mf.placement("cpu", case.mesh)
    graph = mf.graph(model, optimizer, placement=placement, layout=case.layout, backend=backend, progress=False)
    ours = case.name.startswith("our ")
    step = graph(training_step(model, optimizer, ours))
    plain = build(case.name, seed=0, dtype=dtype)
    plain_step = training_step(plain, make_optimizer(plain), ours)
    data, at = placement.shape[0], (placement.coordinate(rank) or (0,))[0]
    start = time.perf_counter()
    for number in range(STEPS):
        whole = whole_batch(case.name, number, dtype)
        torch.manual_seed(number + 1000 * rank)
        loss = step(**{key: t.chunk(data)[at] for key, t in whole.items()}).detach()
        gradients = {name: _whole(p.grad) for name, p in model.named_parameters()}
        tensors = {name: _whole(t.detach()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
        if rank:
            continue
        torch.manual_seed(number)
        expected = plain_step(**whole).detach()
        _note(found, "loss", "", compare.relative(loss, expected))
        wanted = compare.gradients(plain)
        floor = SMALL_GRADIENT * compare.largest(wanted)
        for name, gradient in gradients.items():
            _note(found, "gradient", name, compare.relative(gradient, wanted[name], floor))
        for name, tensor in compare.tensors(plain).items():
            _note(found, "parameter", name, compare.relative(tensors[name], tensor, floor))
    found.seconds = time.perf_counter() - start
    return found


@contextlib.contextmanager
def _in(dtype: str) -> Iterator[None]:
    """Inside, nothing is rounded to float32 in a run of float64."""
    if dtype != "float64":
        yield
        return
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def worker(names: Sequence[str], dtypes: Sequence[str], backend: str, file: str) -> None:
    """All cases on one rank; the first rank writes what it found, a line a case."""
    torch.set_num_threads(1)
    mf.placement.all("cpu").mesh()
    ranks = torch.distributed.get_world_size()
    with open(file, "w") if torch.distributed.get_rank() == 0 else contextlib.nullcontext() as kept:
        for case in [c for dtype in dtypes for c in cases(names, ranks, dtype)]:
            try:
                with _in(case.dtype):
                    found = run(case, backend)
            except Exception as exc:
                found = Found(case, error=f"{type(exc).__name__}: {exc}\n{traceback.format_exc(limit=-4)}")
            if found.error:
                print(f"rank {torch.distributed.get_rank()}: {found.error}", file=sys.stderr)
            if kept is not None:
                print(json.dumps(asdict(found)), file=kept, flush=True)
    torch.distributed.destroy_process_group()


def start(ranks: int, names: Sequence[str], dtypes: Sequence[str], backend: str) -> list[Found]:
    """Runs the worker on `ranks` processes under torchrun."""
    arguments = ["--only", ",".join(names), "--dtypes", ",".join(dtypes), "--backend", backend, "--worker"]
    found = map(json.loads, on_ranks(ranks, "benchmarks.ranks", *arguments).splitlines())
    return [Found(**{**one, "case": Case(**one["case"])}) for one in found]


def table(found: Sequence[Found]) -> Table:
    """A line a case."""
    out = Table(title=f"{STEPS} training steps over real processes against one device, largest relative differences", title_justify="left")
    for column in ("model", "ranks", "layout", "dtype", "loss", "gradients", "parameters", "bound", "s"):
        out.add_column(column, justify="left" if column == "model" else "right")
    for f in found:
        colour = "[green]" if f.right else "[red]"
        numbers = ["error"] * 3 if f.error else [f"{colour}{v:.1e}" for v in (f.loss, f.gradient, f.parameter)]
        out.add_row(f.case.name, str(f.case.ranks), f.case.mode, f.case.dtype, *numbers, f"{BOUNDS[f.case.dtype]:.0e}", f"{f.seconds:.1f}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated: {', '.join(NAMES)}")
    parser.add_argument("--ranks", default="2,4", help="comma-separated (default 2,4)")
    parser.add_argument("--dtypes", default="float32,float64", help="comma-separated (default float32,float64)")
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}")
    dtypes = options.dtypes.split(",")
    if options.worker:
        worker(names, dtypes, options.backend, options.worker)
        return 0
    console = make_console()
    found, expected = [], 0
    for ranks in map(int, options.ranks.split(",")):
        expected += sum(1 for dtype in dtypes for _ in cases(names, ranks, dtype))
        with console.status(f"{ranks} ranks"):
            found += start(ranks, names, dtypes, options.backend)
    console.print(table(found))
    for f in found:
        if not f.right:
            what = f.error or f"worst at {f.where}"
            console.print(f"{f.case.name}, {f.case.ranks} ranks, {f.case.mode}, {f.case.dtype}: {what}", markup=False, highlight=False)
    met = sum(f.right for f in found)
    console.print(f"{met} of {expected} cases meet their bound.")
    return int(met < expected)


if __name__ == "__main__":
    sys.exit(main())
