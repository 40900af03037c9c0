"""Every optimizer follows eager PyTorch to the bit over steps with changing options, and without recompiling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler
from twins import Setup, assert_same, assert_same_state, compare

import monoflow as mf
from benchmarks.optimizer_table import OPTIMIZERS

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

GRAPHS = {"SGD momentum dampening": 2, "RAdam": 2, "ASGD foreach": 1, "ASGD": 2}
"""Where one graph does not do. SGD with dampening starts with the whole first gradient, RAdam switches its rectification on after five
steps, ASGD starts to average after `t0` steps (by a branch, if it is not `foreach`)."""


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(count)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) * self.scale)) + self.frozen


def training(make: Make, schedule: Callable[[Optimizer], Callable[[int], None]] | None = None, clip: bool = False) -> Callable[[], Setup]:
    def setup() -> Setup:
        model = Net()
        optimizer = make(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            model.zero_grad()
            return loss

        return Setup(step, (model, optimizer), schedule(optimizer) if schedule else lambda i: None)

    return setup


def cosine(optimizer: Optimizer) -> Callable[[int], None]:
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    return lambda i: scheduler.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_with_a_changing_learning_rate(name: str) -> None:
    compare(training(OPTIMIZERS[name], cosine), batches(10), graphs=next((n for k, n in GRAPHS.items() if name.startswith(k)), 1))


def test_the_table_has_every_optimizer_of_pytorch() -> None:
    known = {name.split()[0] for name in OPTIMIZERS} | {"LBFGS", "SparseAdam", "Optimizer"}
    assert {name for name, value in vars(optim).items() if isinstance(value, type)} <= known


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.SparseAdam])
def test_optimizers_without_a_static_graph(kind: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(mf.errors.StepError, match=kind.__name__):
        mf.graph(model, kind(model.parameters()))


# Options that change between calls


@pytest.mark.parametrize("kind", ["AdamW", "AdamW foreach", "AdamW fused", "SGD momentum", "SGD nesterov", "RMSprop", "NAdam", "Adamax"])
def test_every_number_changed_between_calls(kind: str) -> None:
    """Learning rate, betas, momentum, weight decay and eps take effect at once, in the same graph."""

    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        def after(i: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
                for option in ("momentum", "eps", "alpha", "dampening"):
                    if group.get(option):
                        group[option] *= 0.97
                if group["weight_decay"]:
                    group["weight_decay"] += 0.01
                if "betas" in group:
                    group["betas"] = (group["betas"][0] * 0.98, group["betas"][1] * 0.99)

        return after

    compare(training(OPTIMIZERS[kind], schedule), batches(6))


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused"])
def test_one_cycle_changes_learning_rate_and_momentum(name: str) -> None:
    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        return lambda i: scheduler.step()

    compare(training(OPTIMIZERS[name], schedule), batches(10))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused", "AdamW tensor lr", "AdamW tensor lr fused"])
def test_warm_up_from_zero(name: str) -> None:
    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: min(i / 3, 1.0))
        return lambda i: scheduler.step()

    compare(training(OPTIMIZERS[name], schedule), batches(6))


def test_weight_decay_switched_on_is_another_graph() -> None:
    """PyTorch branches on whether it is zero."""

    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        def after(i: int) -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.1 if i % 2 else 0.0

        return after

    compare(training(lambda p: optim.SGD(list(p), lr=0.1, momentum=0.9, weight_decay=0.0), schedule), batches(6), graphs=2)


def test_an_integer_learning_rate() -> None:
    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        def after(i: int) -> None:
            optimizer.param_groups[0]["lr"] = 1 if i == 1 else 0.5

        return after

    compare(training(OPTIMIZERS["SGD"], schedule), batches(4))


def test_options_that_are_not_numbers_make_a_graph() -> None:
    def schedule(optimizer: Optimizer) -> Callable[[int], None]:
        def after(i: int) -> None:
            optimizer.param_groups[0]["maximize"] = i == 1

        return after

    compare(training(OPTIMIZERS["AdamW"], schedule), batches(4), graphs=2)


# State


@pytest.mark.parametrize(
    "name", ["SGD", "SGD momentum", "SGD momentum dampening", "AdamW", "AdamW fused", "Adagrad", "Adafactor", "Muon", "RAdam"]
)
def test_graph_and_eager_steps_alternate(name: str) -> None:
    compare(training(OPTIMIZERS[name], cosine), batches(8), alternate=True, graphs=GRAPHS.get(name, 1))


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused", "NAdam", "ASGD", "Rprop"])
def test_existing_state_is_continued(name: str) -> None:
    """Steps taken before the graph exists count, and plain PyTorch goes on from what the graph leaves."""

    def setup() -> Setup:
        made = training(OPTIMIZERS[name])()
        for x, y in batches(3):
            made.step(x, y)
        return made

    plain, other, _ = compare(setup, batches(3), graphs=GRAPHS.get(name, 1))
    fresh = training(OPTIMIZERS[name])()
    for mine, theirs in zip(fresh.state, other.state, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for x, y in batches(2):
        assert_same(fresh.step(x, y), plain.step(x, y))
    assert_same_state(fresh.state, plain.state)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused"])
def test_a_loaded_state_is_used(name: str) -> None:
    def setup() -> Setup:
        made = training(OPTIMIZERS[name])()
        kept: list[Any] = []

        def after(i: int) -> None:
            if i == 0:
                kept.extend(copy.deepcopy(value.state_dict()) for value in made.state)
            if i == 2:
                for value, state in zip(made.state, kept, strict=True):
                    value.load_state_dict(state)

        made.after = after
        return made

    compare(setup, batches(5))


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adafactor", "Muon", "Rprop"])
def test_capture_changes_no_parameter_and_leaves_no_gradient(name: str) -> None:
    made = training(OPTIMIZERS[name])()
    model, optimizer = made.state
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    made.graph().graph_for(*batches(1)[0])
    assert_same(model.state_dict(), before)
    assert_same(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    unused = model.unused
    assert not optimizer.state.get(unused), "eager PyTorch keeps no state for a parameter without gradient"


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_a_parameter_that_gets_its_first_gradient_late(name: str) -> None:
    def setup() -> Setup:
        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor, late: bool) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if late:
                loss = loss + model.unused.square().sum()
            loss.backward()
            optimizer.step()
            return loss

        return Setup(step, (model, optimizer))

    compare(setup, [(x, y, i in (2, 3)) for i, (x, y) in enumerate(batches(6))], graphs=3)


# Several optimizers


def test_two_optimizers_of_a_gan() -> None:
    def setup() -> Setup:
        generator, critic = (
            nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)),
        )
        generator_optimizer = optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.99))
        critic_optimizer = optim.RMSprop(critic.parameters(), lr=0.01)

        def step(real: torch.Tensor) -> Any:
            noise = torch.randn(real.shape[0], 3)
            fake = generator(noise)
            critic_loss = critic(fake.detach()).mean() - critic(real).mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.5, 0.5)
            generator_loss = -critic(fake).mean()
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()
            return critic_loss, generator_loss

        return Setup(step, (generator, critic, generator_optimizer, critic_optimizer))

    compare(setup, [(x,) for x, _ in batches(4)])


def test_two_optimizers_on_parts_of_one_model() -> None:
    def setup() -> Setup:
        model = Net()
        matrices = optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
        others = optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for optimizer in (matrices, others):
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return Setup(step, (model, matrices, others))

    compare(setup, batches(4))


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW foreach", "AdamW fused", "Adafactor"])
def test_clipping_before_the_step(name: str) -> None:
    compare(training(OPTIMIZERS[name], cosine, clip=True), batches(4))


# Optimizers of users


class Counting(Optimizer):
    """Python counts in the state, made when first needed; an attribute of its own counts calls."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "power": 2})
        self.calls = 0
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["average"] = torch.zeros_like(p)
                state["step"] += 1
                state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                rate = group["lr"] / (state["step"] ** 0.5 + self.calls) / group["power"]
                p.add_(state["average"], alpha=-rate)
                self.total += rate


class Reborn(Optimizer):
    """Assigns new tensors to its state instead of changing them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["velocity"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["velocity"] = 0.9 * self.state[p]["velocity"] + p.grad
                    p -= group["lr"] * self.state[p]["velocity"]
            group["lr"] = group["lr"] * 0.99


class Lion(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "moment" not in state:
                        state["moment"] = torch.zeros_like(p)
                    update = state["moment"].mul(first).add(p.grad, alpha=1 - first).sign_()
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                    state["moment"].lerp_(p.grad, 1 - second)


@pytest.mark.parametrize(("kind", "graphs"), [(Counting, 2), (Reborn, 1), (Lion, 2)])
def test_optimizers_written_by_users(kind: Any, graphs: int) -> None:
    """State that is created in the first step is there in the second, which is another graph."""
    compare(training(lambda params: kind(list(params)), cosine), batches(6), graphs=graphs)
    compare(training(lambda params: kind(list(params)), cosine), batches(6), alternate=True, graphs=graphs)


def test_the_attributes_of_an_optimizer_are_part_of_its_state() -> None:
    plain, other, _ = compare(training(lambda params: Counting(list(params))), batches(4), graphs=2)
    assert_same(other.state[1].calls, 4)
    assert_same(other.state[1].total, plain.state[1].total)
