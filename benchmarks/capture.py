"""What it costs to capture the training step of GPT-2 124M with AdamW: `python -m benchmarks.capture`.

The model is `transformers`' GPT-2 with its default config (12 layers of 768, vocabulary 50257) and random weights; the step is forward,
loss, backward, clipping, AdamW. Measured in this one fresh process:

- seconds of `step.graph_for(ids, labels)`: from the Python function to the static graph. Imports and building the model do not count.
- peak memory: the most the process ever held until then, less what it held after its imports, relative to what the model and its AdamW
  own (parameters, exp_avg and exp_avg_sq: three times the parameters). The model itself is in it: 1/3 is the least there can be.

Aims: under 10 seconds, and below 2.5 times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

import monoflow as mf
from benchmarks.models import without_source
from benchmarks.report import console as make_console
from benchmarks.report import peak_memory

SECONDS = 10.0
RATIO = 2.5


@dataclass(frozen=True)
class Capture:
    """What was measured.

    seconds, cpu_seconds    of capture, by the clock and of the processor
    nodes, calls            in the graph; calls are the ones that compute
    without_source          calls that lead to no line of the user's
    parameters              their number
    owned                   bytes of parameters, exp_avg and exp_avg_sq
    before, peak            bytes that the process held at most, before capture and by the end of it
    """

    seconds: float
    cpu_seconds: float
    nodes: int
    calls: int
    without_source: int
    parameters: int
    owned: int
    before: int
    peak: int

    @property
    def ratio(self) -> float:
        return self.peak / self.owned


def measure(batch: int, length: int, layers: int, fused: bool) -> Capture:
    """Build the model and capture its step; nothing is run."""
    imported = peak_memory()
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)

    @mf.graph(model, optimizer, backend="aten")
    def train(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ids = torch.randint(0, model.config.vocab_size, (batch, length))
    before = peak_memory() - imported
    start, cpu_start = time.perf_counter(), time.process_time()
    graph = train.graph_for(ids, ids).graph
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = peak_memory() - imported
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    calls = sum(node.op.startswith("call_") for node in graph.nodes)
    return Capture(seconds, cpu_seconds, len(graph.nodes), calls, len(without_source(graph)), count, 3 * size, before, peak)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12, help="12 is GPT-2 124M")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) in place of the default AdamW")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    options = parser.parse_args(arguments)
    found = measure(options.batch, options.length, options.layers, options.fused)
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        console = make_console()
        table = Table(title=f"Capture of GPT-2, {found.parameters / 1e6:.0f}M parameters, batch {options.batch} x {options.length}")
        for column in ("seconds", "CPU seconds", "nodes", "with source", "model + AdamW MB", "before MB", "peak MB", "peak / owned"):
            table.add_column(column, justify="right")
        table.add_row(
            f"{'[green]' if found.seconds < SECONDS else '[red]'}{found.seconds:.2f}",
            f"{found.cpu_seconds:.2f}",
            str(found.nodes),
            f"{'[red]' if found.without_source else '[green]'}{100 * (1 - found.without_source / found.calls):.4g} %",
            f"{found.owned / 1e6:.0f}",
            f"{found.before / 1e6:.0f}",
            f"{found.peak / 1e6:.0f}",
            f"{'[green]' if found.ratio < RATIO else '[red]'}{found.ratio:.2f}",
        )
        console.print(table)
    return int(found.seconds >= SECONDS or found.ratio >= RATIO or found.without_source > 0)


if __name__ == "__main__":
    sys.exit(main())
