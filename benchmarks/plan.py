"""The plan of a large model on many ranks, on a laptop: `python -m benchmarks.plan`.

A Llama of 7 billion parameters (32 layers of 4096) on simulated ranks, 8-way tensor parallel, the rest data parallel, as fake tensors:
nothing is allocated. Prints the plan, the seconds and the memory that it took, and how long layouts took to deduce.

    python -m benchmarks.plan [--ranks 1024] [--layers 32]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor

import monoflow as mf
from benchmarks.report import console as make_console
from benchmarks.report import peak_memory
from monoflow._torch import FakeTensorMode
from monoflow.layout.lay_out import deduced
from monoflow.layout.pins import Pins

TENSOR_PARALLEL = 8
LENGTH = 2048
COLUMN, ROW = ["B", "S(0)"], ["B", "S(1)"]
LAYOUT = {
    "*.[qkv]_proj.weight": COLUMN,
    "*.o_proj.weight": ROW,
    "*.gate_proj.weight": COLUMN,
    "*.up_proj.weight": COLUMN,
    "*.down_proj.weight": ROW,
    "*.embed_tokens.weight": COLUMN,
    "lm_head.weight": COLUMN,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    console = make_console()
    imported = peak_memory()
    data = options.ranks // TENSOR_PARALLEL
    start = time.perf_counter()
    with FakeTensorMode():
        config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=options.layers, num_attention_heads=32)
        model = LlamaForCausalLM(config)
        ids = torch.zeros(data, LENGTH, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with mf.simulate(options.ranks):
        placement = mf.placement("cpu", torch.arange(options.ranks).reshape(data, TENSOR_PARALLEL), names=("dp", "tp"))

        @mf.graph(model, optimizer, placement=placement, layout=LAYOUT, backend="aten", progress=False)
        def train(input_ids: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=input_ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        planned: Any = train
        plan = planned.plan(ids, ids)
        seconds = time.perf_counter() - start
        laid = planned.laid_out(ids, ids)
        again = time.perf_counter()
        deduced(laid.captured, placement, Pins({}, {}))
        deduction = time.perf_counter() - again
    console.print(plan)
    nodes = len(laid.captured.graph.graph.nodes)
    parameters = sum(p.numel() for p in model.parameters()) / 1e9
    console.print(f"{parameters:.2f} billion parameters on {options.ranks} ranks, {nodes} ops")
    console.print(
        f"plan: {seconds:.1f} s and {(peak_memory() - imported) / 1e9:.2f} GB in all; of these {deduction:.1f} s to deduce layouts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
