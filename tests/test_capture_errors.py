"""What cannot be part of a static graph is an error that names the line, and changes nothing."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marks import marked
from torch import nn
from twins import assert_same, state_of

import monoflow as mf

# Python values outside of the steps below

kept: list[Any] = []
table: dict[str, Any] = {"count": 0}
names: set[str] = set()
recent: collections.deque[Any] = collections.deque(maxlen=4)
counter = 0
best: Any = None


class Meter:
    total = 0

    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.history: list[Any] = []

    def update(self, value: Any) -> None:
        self.sum = value  # MARK: meter

    def count(self) -> None:
        Meter.total += 1  # MARK: class attribute


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


meter = Meter()
slotted = Slotted()


class Net(nn.Module):
    """A network whose inner module does what `does` says."""

    def __init__(self, does: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), Inner(does), nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


class Inner(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], Any] | None) -> None:
        super().__init__()
        self.does = does
        self.calls = 0
        self.last: Any = None
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does is not None:
            x = self.does(self, x)
        return torch.relu(x)


Step = Callable[[torch.Tensor, torch.Tensor], Any]


class Refusal:
    """The error of a step that was refused, after checking that nothing was changed."""

    def __init__(self, body: Callable[[Net, torch.Tensor], Any], does: Any = None, x: torch.Tensor | None = None) -> None:
        model = Net(does)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            body(model, loss)
            return loss

        x = torch.randn(6, 4) if x is None else x
        y = torch.randint(0, 3, (6,))
        step(x.detach().to_dense(), y) if does is None and body is nothing else None
        self.graph = mf.graph(model, optimizer, backend="aten", progress=False)(step)
        objects = (model, optimizer)
        before = copy.deepcopy(state_of(objects)), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        outside = copy.deepcopy(_outside(model))
        with pytest.raises(mf.errors.CaptureError) as caught:
            self.graph(x, y)
        assert_same((state_of(objects), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()), before)
        assert _outside(model) == outside
        self.error = caught.value
        self.text = str(caught.value)

    def at(self, mark: str, file: str = __file__) -> Refusal:
        """The error names the marked line first, and shows its code."""
        line, code = marked(file, mark)
        assert self.text.startswith(f"{file}:{line}: "), self.text
        assert f'File "{file}", line {line}' in self.text
        assert code in self.text
        assert self.error.frame is not None and self.error.frame.line == line
        return self

    def says(self, *words: str) -> Refusal:
        for word in words:
            assert word in self.text, f"{word!r} is not in:\n{self.text}"
        assert self.error.fix and f"fix: {self.error.fix}" in self.text
        return self


def _outside(model: Net) -> Any:
    inner = model.body[1]
    attributes = [vars(inner)[name] for name in ("calls", "last", "seen")]
    return (
        kept,
        table,
        names,
        recent,
        counter,
        best,
        vars(meter),
        Meter.total,
        slotted.value,
        attributes,
        model.training,
        sorted(vars(inner)),
    )


def nothing(model: Net, loss: torch.Tensor) -> None:
    pass


# Values that Python asks for


def branch(model: Net, loss: torch.Tensor) -> None:
    if loss > 1:  # MARK: branch
        loss.mul_(2)


def loop(model: Net, loss: torch.Tensor) -> None:
    while loss > 1:  # MARK: loop
        loss = loss / 2


def item(model: Net, loss: torch.Tensor) -> None:
    loss.item()  # MARK: item


def to_float(model: Net, loss: torch.Tensor) -> None:
    float(loss)  # MARK: float


def to_int(model: Net, loss: torch.Tensor) -> None:
    int(loss)  # MARK: int


def to_bool(model: Net, loss: torch.Tensor) -> None:
    bool(loss)  # MARK: bool


def conjunction(model: Net, loss: torch.Tensor) -> None:
    _ = (loss > 0) and (loss < 2)  # MARK: conjunction


def index(model: Net, loss: torch.Tensor) -> None:
    [1, 2, 3][loss.long()]  # MARK: index


def repetition(model: Net, loss: torch.Tensor) -> None:
    for _ in range(loss.long()):  # MARK: range
        pass


def to_numpy(model: Net, loss: torch.Tensor) -> None:
    loss.detach().numpy()  # MARK: numpy


def to_array(model: Net, loss: torch.Tensor) -> None:
    np.asarray(loss.detach())  # MARK: asarray


def to_list(model: Net, loss: torch.Tensor) -> None:
    loss.tolist()  # MARK: tolist


def extreme(model: Net, loss: torch.Tensor) -> None:
    max(loss, torch.zeros(()))  # MARK: max


def math_function(model: Net, loss: torch.Tensor) -> None:
    math.exp(loss)  # MARK: math


def comparison(model: Net, loss: torch.Tensor) -> None:
    torch.equal(loss, loss)  # MARK: equal


def closeness(model: Net, loss: torch.Tensor) -> None:
    torch.allclose(loss, loss)  # MARK: allclose


def membership(model: Net, loss: torch.Tensor) -> None:
    _ = 1 in loss[None]  # MARK: membership


def assertion(model: Net, loss: torch.Tensor) -> None:
    assert torch.isfinite(loss)  # MARK: assert


def formatting(model: Net, loss: torch.Tensor) -> None:
    _ = f"{loss:.3f}"  # MARK: format


def text(model: Net, loss: torch.Tensor) -> None:
    str(loss)  # MARK: str


def printing(model: Net, loss: torch.Tensor) -> None:
    print(loss)  # MARK: print


def printing_a_list(model: Net, loss: torch.Tensor) -> None:
    print([loss])  # MARK: print list


def logging_it(model: Net, loss: torch.Tensor) -> None:
    logging.getLogger("monoflow.tests").error("loss %s", loss)  # MARK: log


def address(model: Net, loss: torch.Tensor) -> None:
    loss.data_ptr()  # MARK: data_ptr


def sort_key(model: Net, loss: torch.Tensor) -> None:
    sorted([loss, loss * 2])  # MARK: sorted


VALUES: list[tuple[Any, str, str, str]] = [
    (branch, "branch", "branches on the value", "torch.where"),
    (loop, "loop", "branches on the value", "torch.where"),
    (item, "item", "value of a tensor", "return the tensor"),
    (to_float, "float", "float()", "return the tensor"),
    (to_int, "int", "int()", "return the tensor"),
    (to_bool, "bool", "branches on the value", "torch.where"),
    (conjunction, "conjunction", "branches on the value", "torch.where"),
    (index, "index", "index", "torch.gather"),
    (repetition, "range", "index", "torch.gather"),
    (to_numpy, "numpy", "numpy()", "what the step returns"),
    (to_array, "asarray", "NumPy", "what the step returns"),
    (to_list, "tolist", "tolist()", "return the tensor"),
    (extreme, "max", "branches on the value", "torch.where"),
    (math_function, "math", "float()", "return the tensor"),
    (comparison, "equal", "torch.equal", "(a == b).all()"),
    (closeness, "allclose", "torch.allclose", "isclose"),
    (membership, "membership", "`in`", ".any()"),
    (assertion, "assert", "branches on the value", "torch.where"),
    (formatting, "format", "printed", "return the tensor"),
    (text, "str", "printed", "return the tensor"),
    (printing, "print", "printed", "return the tensor"),
    (printing_a_list, "print list", "printed", "return the tensor"),
    (address, "data_ptr", "address", "stay in PyTorch"),
    (sort_key, "sorted", "branches on the value", "torch.where"),
]


@pytest.mark.parametrize(("body", "mark", "why", "fix"), VALUES, ids=[body.__name__ for body, *_ in VALUES])
def test_values(body: Any, mark: str, why: str, fix: str) -> None:
    Refusal(body).at(mark).says(why, fix, "op: ")


def test_values_inside_logging(caplog: pytest.LogCaptureFixture) -> None:
    """The logging module catches errors of formatting; the step is refused all the same."""
    previous, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        Refusal(logging_it).at("log").says("printed")
    finally:
        logging.raiseExceptions = previous


def test_a_refusal_that_the_step_catches_is_raised_all_the_same() -> None:
    def body(model: Net, loss: torch.Tensor) -> None:
        try:
            loss.item()  # MARK: caught
        except Exception:
            loss.mul_(2)

    Refusal(body).at("caught").says("value of a tensor")


# Shapes that depend on values


def mask(model: Net, loss: torch.Tensor) -> None:
    model.head.weight[model.head.weight > 0].sum()  # MARK: mask


def nonzero(model: Net, loss: torch.Tensor) -> None:
    model.head.weight.nonzero()  # MARK: nonzero


def unique(model: Net, loss: torch.Tensor) -> None:
    torch.unique(model.head.weight)  # MARK: unique


def where(model: Net, loss: torch.Tensor) -> None:
    torch.where(model.head.weight > 0)  # MARK: where


def masked_select(model: Net, loss: torch.Tensor) -> None:
    torch.masked_select(model.head.weight, model.head.weight > 0)  # MARK: masked_select


def repeat_interleave(model: Net, loss: torch.Tensor) -> None:
    torch.repeat_interleave(model.head.bias, torch.ones(3).long())  # MARK: repeat_interleave


@pytest.mark.parametrize("body", [mask, nonzero, unique, where, masked_select, repeat_interleave], ids=lambda body: body.__name__)
def test_shapes_that_depend_on_values(body: Any) -> None:
    Refusal(body).at(body.__name__).says("depends on the values", "torch.where(mask, x, 0)", "op: aten.")


# Tensors kept outside


def append(model: Net, loss: torch.Tensor) -> None:
    kept.append(loss)  # MARK: append


def append_detached(model: Net, loss: torch.Tensor) -> None:
    kept.append(loss.detach())  # MARK: append detached


def dictionary(model: Net, loss: torch.Tensor) -> None:
    table["loss"] = loss  # MARK: dictionary


def ring(model: Net, loss: torch.Tensor) -> None:
    recent.append(loss)  # MARK: ring


def attribute(model: Net, loss: torch.Tensor) -> None:
    meter.sum = loss  # MARK: attribute


def method(model: Net, loss: torch.Tensor) -> None:
    meter.update(loss)


def nested(model: Net, loss: torch.Tensor) -> None:
    meter.history.append({"loss": loss})  # MARK: nested


def slot(model: Net, loss: torch.Tensor) -> None:
    slotted.value = loss  # MARK: slot


def global_variable(model: Net, loss: torch.Tensor) -> None:
    global best
    best = loss  # MARK: global


def module_attribute(model: Net, loss: torch.Tensor) -> None:
    model.body[1].last = loss


KEPT: list[tuple[Any, str, str]] = [
    (append, "append", "kept"),
    (append_detached, "append detached", "kept"),
    (dictionary, "dictionary", "table"),
    (ring, "ring", "recent"),
    (attribute, "attribute", "meter.sum"),
    (method, "meter", "meter.sum"),
    (nested, "nested", "meter.history"),
    (slot, "slot", "slotted.value"),
    (global_variable, "global", "best"),
]


@pytest.mark.parametrize(("body", "mark", "name"), KEPT, ids=[body.__name__ for body, *_ in KEPT])
def test_tensors_kept_outside(body: Any, mark: str, name: str) -> None:
    Refusal(body).at(mark).says("a tensor of the step is kept outside of it", f"`{name}`", "return the tensor from the step")


def test_a_tensor_kept_in_a_closure() -> None:
    last: Any = None

    def body(model: Net, loss: torch.Tensor) -> None:
        nonlocal last
        last = loss  # MARK: closure

    Refusal(body).at("closure").says("kept outside", "`last`")
    assert last is None


def test_a_tensor_kept_where_nobody_looks() -> None:
    cached = functools.lru_cache(maxsize=4)(lambda value: value * 2)

    def body(model: Net, loss: torch.Tensor) -> None:
        cached(loss.detach())  # MARK: hidden

    refusal = Refusal(body)
    refusal.says("kept outside")
    assert marked(__file__, "hidden")[1] in refusal.text


def keep_in_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.last = x  # MARK: module attribute
    return x


def keep_in_list_of_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen.append(x)  # MARK: module list
    return x


@pytest.mark.parametrize(("does", "mark"), [(keep_in_module, "module attribute"), (keep_in_list_of_module, "module list")])
def test_tensors_kept_in_a_module(does: Any, mark: str) -> None:
    Refusal(nothing, does).at(mark).says("kept outside", "Inner.")


def test_a_tensor_attached_to_a_tensor() -> None:
    def body(model: Net, loss: torch.Tensor) -> None:
        model.head.weight.cached = loss  # type: ignore[assignment]

    Refusal(body).says("kept outside", "`head.weight.cached`")


# Python effects


def count_global(model: Net, loss: torch.Tensor) -> None:
    global counter
    counter += 1  # MARK: count global


def count_in_dictionary(model: Net, loss: torch.Tensor) -> None:
    table["count"] += 1  # MARK: count in dictionary


def count_in_attribute(model: Net, loss: torch.Tensor) -> None:
    meter.sum += 1.5  # MARK: count in attribute


def count_in_class(model: Net, loss: torch.Tensor) -> None:
    meter.count()


def add_to_set(model: Net, loss: torch.Tensor) -> None:
    names.add("step")  # MARK: add to set


def remember_a_string(model: Net, loss: torch.Tensor) -> None:
    kept.append("done")  # MARK: remember


EFFECTS: list[tuple[Any, str, str]] = [
    (count_global, "count global", "counter"),
    (count_in_dictionary, "count in dictionary", "table"),
    (count_in_attribute, "count in attribute", "meter.sum"),
    (count_in_class, "class attribute", "Meter.total"),
    (add_to_set, "add to set", "names"),
    (remember_a_string, "remember", "kept"),
]


@pytest.mark.parametrize(("body", "mark", "name"), EFFECTS, ids=[body.__name__ for body, *_ in EFFECTS])
def test_python_effects(body: Any, mark: str, name: str) -> None:
    Refusal(body).at(mark).says("once and never again", f"`{name}`", "after the call")


def test_a_counter_in_a_closure() -> None:
    calls = 0

    def body(model: Net, loss: torch.Tensor) -> None:
        nonlocal calls
        calls += 1  # MARK: nonlocal

    Refusal(body).at("nonlocal").says("once and never again", "`calls`")
    assert calls == 0


def count_in_module(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1  # MARK: count in module
    return x


def test_a_counter_in_a_module() -> None:
    Refusal(nothing, count_in_module).at("count in module").says("once and never again", "Inner.calls", "a buffer of the module")


def test_a_counter_in_the_object_of_a_decorated_method() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.calls = 0

        @mf.graph(backend="aten", progress=False)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1  # MARK: decorated method
            return x + 1

    trainer = Trainer()
    with pytest.raises(mf.errors.CaptureError, match=r"\.calls") as caught:
        trainer.step(torch.ones(2))
    assert caught.value.frame is not None and caught.value.frame.line == marked(__file__, "decorated method")[0]
    assert trainer.calls == 0


def test_a_counter_in_a_decorator_of_the_user() -> None:
    calls = {"count": 0}

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            calls["count"] += 1  # MARK: decorator
            return function(*args)

        return wrapper

    @mf.graph(backend="aten", progress=False)
    @torch.no_grad()
    @counted
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(mf.errors.CaptureError, match="`calls`") as caught:
        step(torch.ones(2))
    assert caught.value.frame is not None and caught.value.frame.line == marked(__file__, "decorator")[0]
    assert calls == {"count": 0}


def test_a_scheduler_inside_the_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @mf.graph(optimizer, backend="aten", progress=False)
    def step(x: torch.Tensor) -> None:
        (weight * x).sum().backward()
        optimizer.step()
        scheduler.step()

    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(mf.errors.CaptureError, match="scheduler"):
        step(torch.ones(2))
    assert scheduler.state_dict() == before and optimizer.param_groups[0]["lr"] == 0.1


def test_a_changed_argument() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch.pop("x")
        batch["y"] = x * 2
        return x

    batch = {"x": torch.ones(2)}
    with pytest.raises(mf.errors.CaptureError, match="argument"):
        step(batch)
    assert list(batch) == ["x"]


def test_items_taken_from_an_iterator() -> None:
    items = iter([torch.ones(2), torch.zeros(2)])

    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + next(items)

    with pytest.raises(mf.errors.CaptureError, match="`items`"):
        step(torch.ones(2))
    assert len(list(items)) == 2


# Hooks


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "tensor", "inside"])
def test_hooks_with_side_effects(kind: str) -> None:
    features: list[Any] = []

    def note(*values: Any) -> None:
        features.append(values[-1])  # MARK: hook

    model = Net()
    inner = model.body[1]
    if kind == "forward":
        inner.register_forward_hook(note)
    elif kind == "forward pre":
        inner.register_forward_pre_hook(note)
    elif kind == "backward":
        inner.register_full_backward_hook(note)
    elif kind == "tensor":
        model.head.weight.register_hook(note)

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        if kind == "inside":
            out.register_hook(note)
        loss = out.sum()
        loss.backward()
        return loss

    with pytest.raises(mf.errors.CaptureError) as caught:
        step(torch.randn(6, 4))
    line, code = marked(__file__, "hook")
    assert str(caught.value).startswith(f"{__file__}:{line}: ") and code in str(caught.value) and "`features`" in str(caught.value)
    assert features == []
    assert all(p.grad is None for p in model.parameters())


# Random numbers of others


def python_random(model: Net, loss: torch.Tensor) -> None:
    random.random()  # MARK: random


def numpy_random(model: Net, loss: torch.Tensor) -> None:
    np.random.rand()  # MARK: numpy random


def seeding(model: Net, loss: torch.Tensor) -> None:
    torch.manual_seed(1)  # MARK: manual_seed


def seeding_with_seed(model: Net, loss: torch.Tensor) -> None:
    torch.seed()  # MARK: seed


@pytest.mark.parametrize(
    ("body", "mark"), [(python_random, "random"), (numpy_random, "numpy random"), (seeding, "manual_seed"), (seeding_with_seed, "seed")]
)
def test_random_numbers_of_others(body: Any, mark: str) -> None:
    Refusal(body).at(mark).says("random")


# Wrong tensors


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)

    @mf.graph(table, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = table(x).sum()
        loss.backward()  # MARK: sparse
        return loss

    with pytest.raises(mf.errors.CaptureError) as caught:
        step(torch.tensor([1, 2]))
    line, _ = marked(__file__, "sparse")
    assert str(caught.value).startswith(f"{__file__}:{line}: ") and "sparse=False" in str(caught.value)
    assert table.weight.grad is None


def test_a_sparse_argument_is_fine() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x, y)

    assert_same(step(torch.eye(3).to_sparse(), torch.ones(3, 2)), torch.ones(3, 2))


def test_a_module_that_was_not_given() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        loss = other(hidden).sum()  # MARK: other
        loss.backward()
        return loss

    with pytest.raises(mf.errors.CaptureError) as caught:
        step(torch.randn(2, 4))
    line, code = marked(__file__, "other")
    assert str(caught.value).startswith(f"{__file__}:{line}: ") and code in str(caught.value) and "mf.graph(" in str(caught.value)


def test_a_module_that_was_not_given_under_no_grad() -> None:
    """Its buffers and modes would go unnoticed."""
    model, teacher = nn.Linear(4, 4), nn.BatchNorm1d(4)

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    with pytest.raises(mf.errors.CaptureError, match="BatchNorm1d"):
        step(torch.randn(2, 4))


def test_an_argument_with_history() -> None:
    model = nn.Linear(4, 4)
    step = mf.graph(model, backend="aten", progress=False)(lambda x: model(x).sum())
    with pytest.raises(mf.errors.CaptureError, match=r"argument 0 .*shape \(2, 4\).* history") as caught:
        step(model(torch.randn(2, 4)))
    assert "detach()" in str(caught.value)


def test_an_outer_tensor_that_needs_gradients() -> None:
    weight = torch.ones(4, requires_grad=True)

    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()  # MARK: outer tensor
        loss.backward()
        return loss

    with pytest.raises(mf.errors.CaptureError) as caught:
        step(torch.ones(4))
    line, _ = marked(__file__, "outer tensor")
    assert str(caught.value).startswith(f"{__file__}:{line}: ") and "(4,)" in str(caught.value)
    assert weight.grad is None


def test_lazy_modules() -> None:
    model = nn.LazyLinear(3)
    step = mf.graph(model, backend="aten", progress=False)(lambda x: model(x))
    with pytest.raises(mf.errors.StepError, match="lazy"):
        step(torch.ones(2, 4))


def test_scripted_modules() -> None:
    with pytest.warns(DeprecationWarning):
        model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(mf.errors.StepError, match=r"torch\.jit"):
        mf.graph(model)


def test_padding_left_out_by_the_encoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()

    @mf.graph(encoder, backend="aten", progress=False)
    @torch.no_grad()
    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return encoder(x, src_key_padding_mask=mask)

    with pytest.raises(mf.errors.CaptureError, match="enable_nested_tensor=False"):
        step(torch.randn(2, 3, 8), torch.tensor([[False] * 3, [False, True, True]]))


def test_what_pytorch_cannot_trace() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged).sum()  # MARK: nested tensor

    with pytest.raises(mf.errors.CaptureError, match="cannot trace") as caught:
        step(torch.ones(2, 2))
    assert caught.value.frame is not None and caught.value.frame.line == marked(__file__, "nested tensor")[0]


def test_a_printed_number() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        print(f"{rate:.2f}")  # MARK: rate
        return x * rate

    with pytest.raises(mf.errors.CaptureError, match="printed") as caught:
        step(torch.ones(2), 0.5)
    assert caught.value.frame is not None and caught.value.frame.line == marked(__file__, "rate")[0]


@pytest.mark.parametrize("op", ["ctc", "packed"])
def test_lengths_given_as_tensors(op: str) -> None:
    lstm = nn.LSTM(4, 5)

    @mf.graph(lstm, backend="aten", progress=False)
    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        if op == "ctc":
            return F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), lengths, lengths - 1)
        return lstm(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data

    with pytest.raises(mf.errors.CaptureError, match="tuples of ints" if op == "ctc" else "mask its output"):
        step(torch.randn(6, 2, 4), torch.tensor([6, 4]))


def test_numpy_arguments() -> None:
    step = mf.graph(backend="aten", progress=False)(lambda x: x)
    with pytest.raises(mf.errors.StepError, match=r"torch\.as_tensor"):
        step(np.ones(3))


def test_an_argument_of_an_unknown_class_with_tensors() -> None:
    class Batch:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    step = mf.graph(backend="aten", progress=False)(lambda batch: batch.x * 2)
    with pytest.raises(mf.errors.CaptureError, match="Batch"):
        step(Batch())


def test_a_module_registered_in_the_step() -> None:
    def body(model: Net, loss: torch.Tensor) -> None:
        model.register_buffer("late", loss.detach())  # MARK: late

    Refusal(body).says("registers `late`", "before the first call")


# Errors of the user's own


def wrong_shape(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)  # MARK: shapes


def test_wrong_shapes_name_line_op_and_module() -> None:
    refusal = Refusal(nothing, wrong_shape).at("shapes")
    assert "aten.mm.default(f32[6, 8], f32[3, 3])" in refusal.text
    assert "module: body.1" in refusal.text


class Complaint(ValueError):
    pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_exceptions_of_the_step_pass_through(when: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    complaint = Complaint("no")

    @mf.graph(model, optimizer, backend="aten", progress=False)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(1)
        if when == "before":
            raise complaint
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        raise complaint

    before = copy.deepcopy(state_of((model, optimizer)))
    with pytest.raises(Complaint) as caught:
        step(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    assert caught.value is complaint
    assert_same(state_of((model, optimizer)), before)
    assert kept == []


def test_keyboard_interrupt_changes_nothing() -> None:
    model = Net()

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(1)
        model(x)
        raise KeyboardInterrupt

    before = copy.deepcopy(state_of((model,)))
    with pytest.raises(KeyboardInterrupt):
        step(torch.randn(6, 4))
    assert_same(state_of((model,)), before)
    assert kept == []


# What is fine


def test_effects_that_end_with_the_step_are_fine() -> None:
    scale = {"factor": 2.0}

    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> Any:
        found = []
        local = {"sum": 0}
        for i in range(3):
            found.append(x * i * scale["factor"])
            local["sum"] += i
        meter_here = Meter()
        meter_here.update(x)
        items: Iterator[torch.Tensor] = iter(found)
        return next(items) + next(items), local["sum"], meter_here.sum

    assert_same(step(torch.ones(2)), (torch.full((2,), 2.0), 3, torch.ones(2)))


def test_metadata_is_not_a_value() -> None:
    @mf.graph(backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2 and x.shape[0] > 1 and x.is_floating_point() and x.numel() == 6 and len(x) == 2 and x.device.type == "cpu":
            return x.sum() / x.shape[0]
        return x

    assert step(torch.ones(2, 3)) == 3


def test_the_step_can_be_repaired_and_called_again() -> None:
    wrong = True

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() if wrong else x * x.sum()

    graph = mf.graph(backend="aten", progress=False)(step)
    with pytest.raises(mf.errors.CaptureError):
        graph(torch.ones(2))
    wrong = False
    assert_same(graph(torch.ones(2)), torch.full((2,), 2.0))
