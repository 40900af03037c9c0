"""The "inductor" backend against eager PyTorch: the same random numbers, the same learning rates, numbers within rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_gpt import TinyGPT, batch, step_of
from torch import nn

import monoflow as mf
from monoflow.compile import inductor


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), (_, plain) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"gradient of {n}: {m}")
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for (name, ours), (_, plain) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def train_both(
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    step: Callable[..., Callable[..., torch.Tensor]],
    data: Callable[[int], tuple[torch.Tensor, ...]],
) -> None:
    twin = copy.deepcopy(model)
    ours, plain = optimizer(model.parameters()), optimizer(twin.parameters())
    graph = mf.graph(model, ours, backend="inductor", progress=False)(step(model, ours))
    eager = step(twin, plain)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, plain)]
    for i in range(4):
        torch.manual_seed(i)
        wanted, state = eager(*data(i)), torch.get_rng_state()
        torch.manual_seed(i)
        torch.testing.assert_close(graph(*data(i)), wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), state)
        assert_alike(model, twin)
        for schedule in schedules:
            schedule.step()
    assert graph.graphs_made == 1


@pytest.mark.parametrize("fused", [True, False])
def test_gpt_with_dropout_follows_eager(fused: bool) -> None:
    train_both(TinyGPT(2, dropout=0.2), lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, fused=fused), step_of, batch)


def test_each_distinct_region_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    original = inductor.inductor_compile

    def counting(*args: Any) -> Any:
        compiled.append(1)
        return original(*args)

    monkeypatch.setattr(inductor, "inductor_compile", counting)
    counts = []
    for layers in (2, 5):
        model = TinyGPT(layers)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        mf.graph(model, opt, backend="inductor")(step_of(model, opt))(*batch(0))
        counts.append(len(compiled))
        compiled.clear()
    assert counts[0] == counts[1] <= 5


class ConvNet(nn.Module):
    """Batch statistics, an activation in place, an in-place sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.deep_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.norm(self.conv(x)))
        out = self.deep_norm(self.deep(h))
        out += h
        return self.head(self.act(out).mean((2, 3)))


def classify(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return train


def images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def test_batch_norm_and_writes_in_place_follow_eager() -> None:
    train_both(ConvNet(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), classify, images)


def test_a_write_through_a_view_is_seen_by_its_base_and_outside() -> None:
    held = torch.zeros(4)
    model = nn.Linear(4, 4)

    @mf.graph(model, backend="inductor", progress=False)
    def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base = model(x).exp().sin().cos() * 2
        base[0].add_(1)
        held.add_(base.sum(0))
        return base, held * 1

    x = torch.randn(3, 4)
    with torch.no_grad():
        wanted = model(x).exp().sin().cos() * 2
        wanted[0] += 1
    base, total = evaluate(x)
    torch.testing.assert_close(base, wanted)
    torch.testing.assert_close(total, wanted.sum(0))
    torch.testing.assert_close(held, wanted.sum(0))


def test_concatenation_with_nothing_keeps_predicted_strides() -> None:
    """`cat([empty, x])` of a transposed x is what a fresh key cache does; kernels and fake kernels disagree on its strides."""
    linear = nn.Linear(8, 8)

    @mf.graph(linear, backend="inductor", progress=False)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        heads = linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        joined = torch.cat([torch.empty(0), heads], -2)
        return (joined.exp() @ joined.transpose(-1, -2).sin()).softmax(-1)

    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(x), evaluate.function(x))


def test_a_region_that_fails_to_compile_names_its_lines_and_the_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(inductor, "inductor_compile", broken)
    linear = nn.Linear(4, 4)

    @mf.graph(linear, backend="inductor", progress=False)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return linear(x).exp().sin().cos().tanh().log()

    with pytest.raises(mf.errors.CompileError) as caught:
        evaluate(torch.randn(2, 4))
    text = str(caught.value)
    assert "no such instruction" in text and f"{__file__}:" in text and 'backend="aten"' in text

    x = torch.randn(2, 4)
    automatic = mf.graph(linear, progress=False)(evaluate.function)
    with pytest.warns(mf.errors.CompileWarning, match="no such instruction"):
        result = automatic(x)
    with torch.no_grad():
        torch.testing.assert_close(result, evaluate.function(x), equal_nan=True)


def test_an_op_outside_of_regions_reads_what_a_region_wrote_before_it() -> None:
    held = torch.ones(4)

    @mf.graph(backend="inductor", progress=False)
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        held[1:].zero_()  # through a view: nothing but memory ties it to `held`
        return y, torch.bernoulli(held)

    assert draw(torch.ones(2))[1].tolist() == [1.0, 0.0, 0.0, 0.0]
