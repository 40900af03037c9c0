"""Random numbers follow torch.manual_seed, are new on every call, and are replayed where PyTorch replays them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from twins import Setup, assert_same, compare

import monoflow as mf


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(count)]


def test_new_numbers_on_every_call() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)

    x = torch.ones(64)
    torch.manual_seed(3)
    first, second = step(x), step(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(step(x), first) and torch.equal(step(x), second)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(x, 0.5), first)
    assert step.graphs_made == 1


def test_every_kind_of_draw() -> None:
    def setup() -> Setup:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            draws = [
                torch.rand(3),
                torch.randn(2, 2),
                torch.randint(0, 9, (4,)),
                torch.randperm(5),
                torch.rand_like(x),
                torch.randn_like(x),
            ]
            draws += [
                torch.empty(3).uniform_(-1, 1),
                torch.empty(3).normal_(),
                torch.zeros(3).exponential_(),
                torch.zeros(3).bernoulli_(0.3),
            ]
            draws += [torch.bernoulli(x.sigmoid()), torch.multinomial(x.softmax(-1), 2), torch.normal(x, 1.0), torch.poisson(x.abs())]
            draws += [F.dropout1d(x[None]), F.feature_alpha_dropout(x, 0.2), F.gumbel_softmax(x), F.rrelu(x, training=True)]
            draws += [torch.distributions.Normal(x, 1.0, validate_args=False).rsample()]
            return draws

        return Setup(step, ())

    compare(setup, batches(3))


def test_a_generator_of_the_user() -> None:
    generator = torch.Generator().manual_seed(1)
    same = torch.Generator().manual_seed(1)

    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=generator)

    x = torch.zeros(4)
    for _ in range(3):
        assert_same(step(x), torch.randn(4, generator=same))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.layer(x))))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint_replays_dropout(reentrant: bool, preserve: bool) -> None:
    def setup() -> Setup:
        blocks = nn.ModuleList([Block() for _ in range(3)])
        head = nn.Linear(8, 3)
        optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = F.dropout(x, 0.1)
            if reentrant:
                hidden.requires_grad_()
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant, preserve_rng_state=preserve)
            loss = F.cross_entropy(head(hidden), y)
            loss.backward()
            nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
            optimizer.step()
            return loss + F.dropout(loss, 0.5)

        return Setup(step, (blocks, head, optimizer))

    compare(setup, batches())


def test_checkpoint_computes_twice() -> None:
    block = Block()

    @mf.graph(block, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpoint(block, x, use_reentrant=False).sum()
        loss.backward()
        return loss

    graph = step.graph_for(torch.randn(2, 8))
    layers = [n for n in graph.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert len(layers) == 2
    assert [n.meta["op"].module for n in layers] == ["layer", "layer"]


def test_checkpoint_sequential() -> None:
    def setup() -> Setup:
        model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(checkpoint_sequential(model, 2, x, use_reentrant=False), y)
            loss.backward()
            optimizer.step()
            return loss

        return Setup(step, (model, optimizer))

    compare(setup, batches(3))


def test_the_random_state_read_and_set_by_the_step() -> None:
    def setup() -> Setup:
        def step(x: torch.Tensor) -> Any:
            state = torch.get_rng_state()
            first = torch.rand(3)
            torch.set_rng_state(state)
            return first, torch.rand(3), torch.rand(3)

        return Setup(step, ())

    compare(setup, [(x,) for x, _ in batches(3)])


def test_fork_rng() -> None:
    def setup() -> Setup:
        def step(x: torch.Tensor) -> Any:
            with torch.random.fork_rng(devices=[]):
                first = torch.rand(3)
            return first, torch.rand(3)

        return Setup(step, ())

    compare(setup, [(x,) for x, _ in batches(3)])
