"""What benchmarks of training steps have in common: ways to run the same step, and whether their losses agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import Step

LEARNING_RATE = 1e-4
TOLERANCE = 1e-3
COMPARED = 10

Setup = Callable[[nn.Module, Step], Step]


@dataclass(frozen=True)
class Contender:
    """One way to run a training step. `setup` turns a model and a loss function into the step; `peer` is False for monoflow's own."""

    label: str
    setup: Setup
    peer: bool = True


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """The optimizer that all contenders use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **options)


def disagreement(losses: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between the losses of any contender and the first, after the same number of steps."""
    worst = 0.0
    for other in losses[1:]:
        for expected, actual in zip(losses[0][:COMPARED], other[:COMPARED], strict=True):
            difference = abs(actual - expected) / abs(expected)
            worst = math.inf if math.isnan(difference) else max(worst, difference)
    return worst
