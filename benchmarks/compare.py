"""How far two training runs are apart, in the measures that the benchmarks and tests state their bounds in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

Named = Mapping[str, Tensor | None]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by parameter name; None where a parameter has none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def tensors(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the parameters and buffers by name."""
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """Copies of the tensors and numbers that the optimizer keeps, as "index of the parameter.name"."""
    state: Mapping[int, Mapping[str, Tensor | float]] = optimizer.state_dict()["state"]
    return {f"{i}.{k}": torch.as_tensor(v).detach().clone() for i, kept in state.items() for k, v in kept.items() if v is not None}


def differing(actual: Named, expected: Named) -> list[str]:
    """The names whose tensors are not bitwise equal (NaN equals NaN), or that only one side has."""
    names = list(expected) + [name for name in actual if name not in expected]
    return [name for name in names if not _same(actual.get(name), expected.get(name))]


def _same(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return torch.equal(actual, expected) or bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def ulp(x: Tensor) -> Tensor:
    """The distance from |x| to the next larger number of its dtype, elementwise."""
    size = x.detach().abs()
    return torch.nextafter(size, torch.full_like(size, math.inf)) - size


def update_ulps(actual: Tensor, expected: Tensor, before: Tensor) -> float:
    """How far an updated parameter is from where it should be, in ulp of the update.

    The unit is one ulp of the largest |expected - before|. A parameter is usually far larger than its update, so that adding the update
    rounds it to the parameter's own, coarser ulp; one of those is taken off first, elementwise:

        |actual - expected| <= result * ulp(max |expected - before|) + ulp(expected)

    0 where the two are bitwise equal; inf where they differ though the parameter should not have moved.
    """
    distance = (actual.detach().double() - expected.detach().double()).abs()
    if not distance.any():
        return 0.0
    largest = (expected.detach() - before.detach()).abs().max()
    if not largest > 0 or bool(distance.isnan().any()):
        return math.inf
    excess = (distance - ulp(expected).double()).clamp(min=0)
    return float(excess.max() / ulp(largest).double())


def relative(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """Max |actual - expected| / max |expected|, in the largest element of each; `floor` is the smallest denominator."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else math.inf
    distance = (actual.detach().double() - expected.detach().double()).abs().max().item() if expected.numel() else 0.0
    if distance == 0.0:
        return 0.0
    size = max(expected.detach().double().abs().max().item(), floor)
    return distance / size if size > 0 and not math.isnan(distance) else math.inf


def largest(values: Named) -> float:
    """The largest magnitude in any of the tensors."""
    return max((float(v.detach().double().abs().max()) for v in values.values() if v is not None and v.numel()), default=0.0)
