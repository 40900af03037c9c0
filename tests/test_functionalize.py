"""A step that writes into its values is the same step without writes: over simulated ranks, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import monoflow as mf


def result_of_a_write_is_used_after_another(x: Tensor) -> Tensor:
    y = x.add_(1)
    x.mul_(2)
    return y + 1


def write_through_views_of_views(x: Tensor) -> Tensor:
    y = x * 1
    y.view(-1)[2:9].view(7, 1)[::2].mul_(3)
    y.t()[1].add_(5)
    y.unbind(1)[0].neg_()
    y.split(2)[1].zero_()
    return y.sum(1)


def out_argument(x: Tensor) -> Tensor:
    y = torch.empty(4, 4)
    z = torch.mm(x, x.t(), out=y[:4])
    torch.add(y, 1, out=y)
    return z * y


def view_changed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.transpose_(0, 1)
    y.squeeze_().unsqueeze_(0)
    return y.exp()


def power_in_place(x: Tensor) -> Tensor:
    return (x * x).pow_(2.0).clamp_(max=3)


def write_through_diagonal(x: Tensor) -> Tensor:
    y = x @ x.t()
    y.diagonal().fill_(0)
    return y


@pytest.mark.parametrize(
    "function",
    [
        result_of_a_write_is_used_after_another,
        write_through_views_of_views,
        out_argument,
        view_changed_in_place,
        power_in_place,
        write_through_diagonal,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("inputs", ["S(0)", "S(1)", "B"])
def test_equals_the_writes(function: Callable[[Tensor], Tensor], inputs: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    own, given = x.clone(), x.clone()
    wanted = function(own)
    with mf.simulate(3):
        step = mf.graph(placement=mf.placement.all("cpu"), inputs=inputs, backend="aten", progress=False)(function)
        got = step(given)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert torch.equal(own, given), "what was given is written to as well"
