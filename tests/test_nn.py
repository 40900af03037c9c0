"""mf.nn.Graph: the class form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monoflow as mf


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


class Train(mf.nn.Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()
        self.config.backend = "aten"
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss


class Evaluate(mf.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config.backend = "aten"

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).argmax(-1)


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def test_trains_like_eager_and_steps_the_scheduler() -> None:
    model, optimizer, scheduler = make()
    twin, twin_optimizer, twin_scheduler = make()
    graph = Train(model, optimizer, scheduler)
    for step in range(4):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(twin(x), y)
        loss.backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        twin_scheduler.step()
        assert torch.equal(graph(x, y), loss)
    assert optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_state_dict_goes_to_a_new_graph_and_on_to_the_same_numbers() -> None:
    graph = Train(*make())
    for step in range(2):
        graph(*batch(step))
    saved = copy.deepcopy(graph.state_dict())
    other = Train(*make(seed=1))
    other.load_state_dict(saved)
    assert torch.equal(graph(*batch(5)), other(*batch(5)))
    assert torch.equal(graph(*batch(6)), other(*batch(6)))


def test_state_can_be_loaded_after_the_first_call() -> None:
    graph = Train(*make())
    saved = copy.deepcopy(graph.state_dict())
    first = graph(*batch(0))
    graph(*batch(1))
    graph.load_state_dict(saved)
    assert torch.equal(graph(*batch(0)), first)


def test_load_state_dict_names_missing_parts() -> None:
    graph = Train(*make())
    with pytest.raises(mf.errors.StepError, match="optimizers"):
        graph.load_state_dict({"model": {}, "loss": {}})


def test_evaluation_graph_has_no_optimizer() -> None:
    model, *_ = make()
    model.eval()
    graph = Evaluate(model)
    assert not graph.training and not graph.is_compiled
    x, _ = batch(0)
    assert torch.equal(graph(x), model(x).argmax(-1))
    assert graph.is_compiled


def test_names_count_up_and_repr_shows_parameters() -> None:
    first, second = Evaluate(Net()), Evaluate(Net())
    prefix, number = first.name.rsplit("_", 1)
    assert prefix == "Evaluate" and second.name == f"Evaluate_{int(number) + 1}"
    text = repr(Train(*make()))
    assert "(model): Net" in text and "weight: Parameter[8, 4] float32" in text and "running_mean: Buffer[8]" in text and "SGD" in text


def test_debug_levels_print(capsys: pytest.CaptureFixture[str]) -> None:
    graph = Train(*make())
    graph.debug(2)
    graph(*batch(0))
    text = capsys.readouterr().out
    assert "ops" in text and "(model): Net" in text and "loss = self.loss(self.model(x), y)" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.zeros(1), "hold tensors in a module"), (torch.optim.SGD([torch.zeros(1)], lr=1.0), "add_optimizer")],
)
def test_wrong_attributes_say_what_to_do(value: Any, words: str) -> None:
    graph = Evaluate(Net())
    with pytest.raises(mf.errors.StepError, match=words):
        graph.extra = value


def test_build_must_be_overridden() -> None:
    with pytest.raises(NotImplementedError, match="build"):
        mf.nn.Graph()(torch.zeros(1))


def test_assignment_before_init_says_so() -> None:
    class Wrong(mf.nn.Graph):
        def __init__(self) -> None:
            self.model = Net()

    with pytest.raises(mf.errors.StepError, match="super"):
        Wrong()


def test_scheduler_of_another_optimizer_is_refused() -> None:
    model, optimizer, _ = make()
    _, _, scheduler = make()
    with pytest.raises(mf.errors.StepError, match="another optimizer"):
        Train(model, optimizer, scheduler)
