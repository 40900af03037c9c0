"""Seventeen architectures of `transformers`, dropout on: captured whole, equal to eager PyTorch to the bit, with a source for every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Setup, compare

from benchmarks.architectures import ARCHITECTURES
from monoflow import OpInfo

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training(name: str) -> None:
    architecture = ARCHITECTURES[name]

    def setup() -> Setup:
        model = architecture.build(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(**batch: torch.Tensor) -> Any:
            output = model(**batch)
            output[0].backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return output, norm

        return Setup(step, (model, optimizer))

    _, _, step = compare(setup, [architecture.batch(seed=i) for i in range(2)])
    nodes = [n for n in step.graph_for(**architecture.batch(seed=0)).graph.nodes if n.op == "call_function"]
    for node in nodes:
        info = node.meta["op"]
        assert isinstance(info, OpInfo) and info.source and info.user is not None and info.user.file == __file__
        assert (info.phase == "backward") == (info.forward is not None)
    assert {n.meta["op"].phase for n in nodes} == {"forward", "backward", "update"}
    assert sum(n.meta["op"].module == "" for n in nodes if n.meta["op"].phase == "forward") < 0.2 * len(nodes)
