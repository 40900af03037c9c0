"""How long collectives take: `python -m benchmarks.collectives`.

Two processes of one thread (torchrun, gloo), float32 tensors; the ways take turns, round after round. Printed are medians in milliseconds,
and, for the largest size, bandwidth (bytes that a rank sends over seconds). `monoflow/lower/ways.py` and the costs of `cpu` in
`monoflow/layout/cost.py` are taken from here.

    python -m benchmarks.collectives [--ranks 2] [--sizes 0.004,1,16,64] [--rounds 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.report import console as make_console
from benchmarks.torchrun import on_ranks

_functional: Any = torch.ops._c10d_functional


def _wait(value: Tensor) -> Tensor:
    done: Tensor = _functional.wait_tensor(value)
    return done


def _summed(x: Tensor, group: str, ranks: int) -> Tensor:
    split = [len(x) // ranks] * ranks
    return _wait(_functional.all_to_all_single(x, split, split, group)).view(ranks, -1).sum(0)


WAYS: dict[str, tuple[Callable[[Tensor, str, int], Tensor], float]] = {
    "all-reduce": (lambda x, group, ranks: _wait(_functional.all_reduce(x, "sum", group)), 2.0),
    "all-reduce in place": (lambda x, group, ranks: _wait(_functional.all_reduce_(x, "sum", group)), 2.0),
    "reduce-scatter": (lambda x, group, ranks: _wait(_functional.reduce_scatter_tensor(x, "sum", ranks, group)), 1.0),
    "all-to-all and sum": (_summed, 1.0),
    "all-gather": (lambda x, group, ranks: _wait(_functional.all_gather_into_tensor(x[: len(x) // ranks].clone(), ranks, group)), 1.0),
    "all-to-all": (lambda x, group, ranks: _wait(_functional.all_to_all_single(x, *[[len(x) // ranks] * ranks] * 2, group)), 1.0),
}
"""Name -> (the call on a tensor of the full size, bytes sent in units of (N-1)/N of that size)."""


def worker(sizes: Sequence[float], rounds: int, file: str) -> None:
    """Seconds of each way for each size in megabytes, on this rank; the first one writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    found: dict[str, list[float]] = {}
    for size in sizes:
        count = max(int(size * 2**20 / 4) // ranks * ranks, ranks)
        for number in range(rounds + 1):
            for name, (call, _) in WAYS.items():
                x = torch.ones(count)
                dist.barrier()
                start = time.perf_counter()
                call(x, group, ranks)
                if number:  # the first round warms up
                    found.setdefault(f"{name}|{size}", []).append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps({key: statistics.median(values) for key, values in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def crash(file: str, seconds: float = 30) -> None:
    """Two all-gathers at once, over and over. With PyTorch 2.13 and gloo the process mostly dies within ten seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    ended = torch.zeros(1)
    start, rounds = time.perf_counter(), 0
    while not ended:
        started = [_functional.all_gather_into_tensor(torch.ones(4032), ranks, group) for _ in range(2)]
        for value in started:
            _wait(value)
        rounds += 1
        if rounds % 200 == 0:
            ended = torch.tensor([float(time.perf_counter() - start > seconds)])
            dist.broadcast(ended, 0)
    if dist.get_rank() == 0:
        Path(file).write_text(f"{rounds} rounds without a failure")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="0.004,1,16,64", help="megabytes, comma-separated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--crash", action="store_true", help="start all-gathers together, in plain PyTorch, until they fail")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [float(s) for s in options.sizes.split(",")]
    if options.worker and options.crash:
        crash(options.worker)
        return 0
    if options.crash:
        print(on_ranks(options.ranks, "benchmarks.collectives", "--crash", "--worker"))
        return 0
    if options.worker:
        worker(sizes, options.rounds, options.worker)
        return 0
    arguments = ["--sizes", options.sizes, "--rounds", str(options.rounds), "--worker"]
    found = json.loads(on_ranks(options.ranks, "benchmarks.collectives", *arguments))
    table = Table(title=f"gloo, {options.ranks} ranks: milliseconds", title_justify="left")
    for column in ("collective", *(f"{s:g} MB" for s in sizes), "GB/s"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for name, (_, units) in WAYS.items():
        times = [found[f"{name}|{s}"] for s in sizes]
        sent = units * (options.ranks - 1) / options.ranks * sizes[-1] * 2**20
        table.add_row(name, *(f"{t * 1e3:.2f}" for t in times), f"{sent / times[-1] / 1e9:.2f}")
    make_console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
