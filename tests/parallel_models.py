"""Steps of the small models, with plain PyTorch on one device beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.small_models import MODELS


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(*inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, fused=True),
}


def reference(model: nn.Module, optimizer: str, inputs: tuple[Tensor, ...], steps: int) -> tuple[list[float], nn.Module]:
    """The losses of plain PyTorch on one device, and the model after."""
    model = copy.deepcopy(model)
    step = training_step(model, OPTIMIZERS[optimizer](model.parameters()))
    torch.manual_seed(5)
    return [float(step(*inputs).detach()) for _ in range(steps)], model


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Of parameters, gradients and buffers, relative to the largest element of each tensor.

    Tensors smaller than 1e-4 of the largest gradient count as that large: the bias of keys, or of a convolution before batch norm, has a
    gradient of zero, and what is computed for it is nothing but rounding.
    """
    worst = 0.0
    largest = max((float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None), default=1.0)
    for (_, a), (_, b) in zip(_tensors(one), _tensors(other), strict=True):
        whole = b.full_tensor() if hasattr(b, "full_tensor") else b
        if a.is_floating_point():
            worst = max(worst, float((a - whole).abs().max() / a.abs().max().clamp_min(1e-4 * largest)))
    return worst


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = [(n, p.detach()) for n, p in model.named_parameters()]
    found += [(f"{n}.grad", p.grad) for n, p in model.named_parameters() if p.grad is not None]
    return found + [(n, b) for n, b in model.named_buffers()]
