"""Which calls share a graph, what is said when too many are made, and how many are kept."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import assert_same

import monoflow as mf
from monoflow.step import CACHE_SIZE

scale = 2.0
settings = {"scale": 2.0, "other": 1}
weights = [1.0, 2.0]


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    unrelated: int = 0


config = Config()
namespace = argparse.Namespace(scale=2.0)
simple = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))
mask = torch.ones(3)


def graph_of(function: Any, *state: Any) -> mf.Step[..., Any]:
    return mf.graph(*state, backend="aten", progress=False)(function)


# Arguments


def test_shapes_dtypes_strides_and_gradients() -> None:
    step = graph_of(lambda x: x * 2)
    x = torch.ones(2, 3)
    for argument, graphs in [
        (x, 1),
        (x + 1, 1),
        (torch.ones(3, 3), 2),
        (x.double(), 3),
        (torch.ones(3, 2).t(), 4),
        (x.clone().requires_grad_(), 5),
        (x, 5),
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mf.errors.RecompileWarning)
            assert_same(step(argument), (argument * 2).detach())
        assert step.graphs_made == graphs


def test_floats_are_inputs_and_other_values_are_not() -> None:
    step = graph_of(lambda x, y: x * y if isinstance(y, int | float) else x)
    x = torch.ones(2)
    for value, graphs in [(0.5, 1), (1.5, 1), (float("inf"), 1), (2, 2), (3, 3), (2, 3), (True, 4), ("text", 5), (None, 6)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mf.errors.RecompileWarning)
            got = step(x, value)
        assert_same(got, x * value if isinstance(value, int | float) else x)
        assert step.graphs_made == graphs, value


def test_a_float_that_python_branches_on() -> None:
    step = graph_of(lambda x, p: x * 2 if p > 0.5 else x * p)
    x = torch.ones(2)
    for value, graphs in [(0.1, 1), (0.2, 1), (0.9, 2), (0.8, 2), (0.3, 2)]:
        assert_same(step(x, value), x * 2 if value > 0.5 else x * value)
        assert step.graphs_made == graphs


def test_a_float_as_an_option_of_an_op() -> None:
    """The rate of dropout is part of PyTorch's op, so each value is a graph."""
    step = graph_of(lambda x, p: F.dropout(x, p))
    x = torch.ones(8)
    for value, graphs in [(0.1, 1), (0.5, 2), (0.1, 2)]:
        torch.manual_seed(0)
        got = step(x, value)
        torch.manual_seed(0)
        assert_same(got, F.dropout(x, value))
        assert step.graphs_made == graphs


def test_floats_in_ops_and_arithmetic() -> None:
    def body(x: torch.Tensor, a: float, b: float) -> Any:
        rate = (a + 1) ** 2 / max(b, 0.1) - abs(-a) % 0.3
        return (
            x * rate,
            x.add(x, alpha=a),
            torch.full((2,), b),
            x.clamp(min=a, max=b),
            x.pow(b),
            rate,
            torch.lerp(x, x * 2, a),
            x[0].item if False else a,
        )

    step = graph_of(body)
    x = torch.tensor([0.5, 1.5])
    for a, b in [(0.1, 1.0), (0.7, 2.5), (0.25, 0.5)]:
        assert_same(step(x, a, b), body(x, a, b))
    assert step.graphs_made == 1


def test_structures_of_arguments() -> None:
    step = graph_of(lambda *args, **kwargs: sum(x.sum() for x in [*args, *kwargs.values()]))
    x = torch.ones(2)
    for args, kwargs, graphs in [((x,), {}, 1), ((x, x), {}, 2), ((x,), {"y": x + 0}, 3), ((x + 0,), {"y": x}, 3)]:
        assert step(*args, **kwargs) == 2 * (len(args) + len(kwargs))
        assert step.graphs_made == graphs


def test_objects_that_cannot_be_hashed() -> None:
    """They count by identity, and are kept so that no other object is taken for them."""
    step = graph_of(lambda x, names: x * len(names))
    x = torch.ones(2)
    first, second = {"a"}, {"a", "b"}
    assert_same(step(x, first), x)
    assert_same(step(x, second), x * 2)
    assert_same(step(x, first), x)
    assert step.graphs_made == 2


# Modules


def test_train_and_eval() -> None:
    model = nn.Dropout(0.5)
    step = graph_of(lambda x: model(x), model)
    x = torch.ones(64)
    assert not torch.equal(step(x), x)
    model.eval()
    assert torch.equal(step(x), x)
    model.train()
    assert not torch.equal(step(x), x)
    assert step.graphs_made == 2


def test_a_frozen_parameter_is_another_graph() -> None:
    model = nn.Linear(2, 2)

    def body(x: torch.Tensor) -> None:
        model(x).sum().backward()

    step = graph_of(body, model)
    step(torch.ones(1, 2))
    model.zero_grad()
    model.bias.requires_grad_(False)
    step(torch.ones(1, 2))
    assert model.bias.grad is None and model.weight.grad is not None
    assert step.graphs_made == 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.sizes = [1, 2]
        self.options = {"power": 1}
        self.activation = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x) * self.config.scale * sum(self.sizes) ** self.options["power"]


def test_settings_of_modules() -> None:
    """Plain values in a module's lists, dicts and settings objects are baked in, hence watched."""
    model = Scaled()
    step = graph_of(lambda x: model(x), model)
    x = torch.tensor([-1.0, 1.0])

    def check(graphs: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mf.errors.RecompileWarning)
            assert_same(step(x), model(x))
        assert step.graphs_made == graphs

    check(1)
    model.config.scale = 3.0
    check(2)
    model.sizes[0] = 5
    check(3)
    model.options["power"] = 2
    check(4)
    model.activation = torch.sigmoid
    check(5)
    model.config = Config()
    model.sizes, model.options, model.activation = [1, 2], {"power": 1}, torch.relu
    check(6)
    check(6)


# Python outside


def outer(x: torch.Tensor) -> torch.Tensor:
    return x * scale * settings["scale"] * config.scale * namespace.scale * simple.inner.scale * weights[0] * mask


def test_values_outside_of_the_step_are_part_of_the_signature() -> None:
    global scale, mask
    step = graph_of(outer)
    x = torch.ones(3)

    def check(graphs: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mf.errors.RecompileWarning)
            assert_same(step(x), outer(x))
        assert step.graphs_made == graphs

    check(1)
    config.unrelated = 5
    settings["other"] = 2
    check(1)
    scale = 3.0
    check(2)
    settings["scale"] = 3.0
    check(3)
    config.scale = 3.0
    check(4)
    namespace.scale = 3.0
    check(5)
    simple.inner.scale = 3.0
    check(6)
    weights[0] = 3.0
    check(7)
    mask = torch.tensor([1.0, 0.0, 1.0])
    check(8)
    mask[0] = 5.0
    check(8)


def test_a_closure_variable_is_part_of_the_signature() -> None:
    factor = 1.0

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    step = graph_of(lambda x: helper(x))
    x = torch.ones(2)
    assert_same(step(x), x)
    factor = 2.0
    assert_same(step(x), x * 2)
    assert step.graphs_made == 2


def test_the_attributes_of_self() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.factor = 1.0
            self.steps_done = 0

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    trainer = Trainer()
    step = graph_of(trainer.run)
    x = torch.ones(2)
    assert_same(step(x), x)
    trainer.steps_done += 1
    assert_same(step(x), x)
    assert step.graphs_made == 1
    trainer.factor = 2.0
    assert_same(step(x), x * 2)
    assert step.graphs_made == 2


def test_a_criterion_outside() -> None:
    """A module without parameters need not be given; its settings are watched all the same."""
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    step = graph_of(lambda x, y: criterion(x, y))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert_same(step(x, y), criterion(x, y))
    criterion.label_smoothing = 0.3
    assert_same(step(x, y), criterion(x, y))
    assert step.graphs_made == 2


def test_settings_of_pytorch() -> None:
    step = graph_of(lambda x: x @ torch.ones(2, 2))
    x = torch.ones(2, 2)
    step(x)
    with torch.no_grad():
        step(x)
    assert step.graphs_made == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert step(x).dtype == torch.bfloat16
    assert step.graphs_made == 3


# Too many graphs


def test_the_fourth_graph_says_what_changed() -> None:
    step = graph_of(lambda x: x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1, 2, 3):
            step(torch.ones(size))
    with pytest.warns(mf.errors.RecompileWarning, match=r"4th time.*changed.*\d.*-> .*4") as caught:
        step(torch.ones(4))
    assert caught[0].filename == __file__, "the warning is at the user's call"


def test_the_warning_names_a_module_attribute() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    step = graph_of(lambda x: model(x), model)
    for p in (0.1, 0.2, 0.3):
        model[1].p = p
        step(torch.ones(1, 2))
    model[1].p = 0.4
    with pytest.warns(mf.errors.RecompileWarning, match=r"1\.p.*0\.4"):
        step(torch.ones(1, 2))


def test_the_warning_names_an_outer_variable() -> None:
    count = 0
    step = graph_of(lambda x: x + count)
    for value in range(3):
        count = value
        step(torch.ones(1))
    count = 3
    with pytest.warns(mf.errors.RecompileWarning, match=r"`count`"):
        step(torch.ones(1))


def test_the_cache_forgets_the_least_recently_used() -> None:
    step = graph_of(lambda x: x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.errors.RecompileWarning)
        for size in range(1, CACHE_SIZE + 1):
            step(torch.ones(size))
        step(torch.ones(1))
        step(torch.ones(CACHE_SIZE + 1))
        assert step.graphs_made == CACHE_SIZE + 1
        step(torch.ones(1))
        assert step.graphs_made == CACHE_SIZE + 1, "used lately"
        step(torch.ones(2))
        assert step.graphs_made == CACHE_SIZE + 2, "forgotten"


# What a step keeps alive


def test_neither_arguments_nor_results_are_kept_alive() -> None:
    model = nn.Linear(2, 2)

    def body(x: torch.Tensor) -> Any:
        loss = model(x).sum()
        loss.backward()
        return {"loss": loss, "x": x * 2}

    step = graph_of(body, model)
    for _ in range(2):
        x = torch.ones(1, 2, requires_grad=True)
        kept = weakref.ref(x)
        result = step(x)
        kept_result = weakref.ref(result["x"])
        del x, result
        gc.collect()
        assert kept() is None and kept_result() is None
        model.zero_grad()


def test_loading_does_not_keep_the_old_parameters_alive() -> None:
    model = nn.Linear(2, 2)
    step = graph_of(lambda x: model(x), model)
    step(torch.ones(1, 2))
    old = weakref.ref(model.weight)
    model.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.ones(2)}, assign=True)
    assert_same(step(torch.ones(1, 2)), torch.ones(1, 2))
    gc.collect()
    assert old() is None
    assert step.graphs_made == 1


def test_a_step_inside_of_a_step() -> None:
    model = nn.Linear(2, 2)
    inner = graph_of(lambda x: model(x).sum(), model)

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = inner(x) * 2
        loss.backward()
        return loss

    step = graph_of(body, model)
    x = torch.ones(1, 2)
    assert_same(step(x), model(x).sum().detach() * 2)
    assert model.weight.grad is not None
    assert inner.graphs_made == 0


class Trainer:
    """A step as a decorated method, which reads an attribute of its object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @mf.graph(backend="aten")
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_decorated_method_belongs_to_its_object_and_sees_its_attributes() -> None:
    first, second = Trainer(2.0), Trainer(3.0)
    x = torch.ones(2)
    assert first.step(x).tolist() == [2.0, 2.0] and second.step(x).tolist() == [3.0, 3.0]
    assert first.step is first.step and first.step is not second.step
    first.scale = 5.0
    assert first.step(x).tolist() == [5.0, 5.0]
    assert first.step.graphs_made == 2 and second.step.graphs_made == 1
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None
