"""What cannot be laid out over ranks is a named error on every rank, at once, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monoflow as mf
from benchmarks.small_models import batch
from tests.parallel_models import OPTIMIZERS, build, training_step
from tests.processes import ProcessesFailed, run_on


def _rank() -> int:
    return torch.distributed.get_rank()


def _all() -> Any:
    return mf.placement.all("cpu")


def _step(name: str = "mlp", **options: Any) -> tuple[Any, Any]:
    model = build(name)
    made = OPTIMIZERS["sgd"](model.parameters())
    options = {"placement": _all(), **options}
    return mf.graph(model, made, backend="aten", progress=False, **options)(training_step(model, made)), model


def _other_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8 + 8 * _rank()), torch.nn.ReLU())
    made = OPTIMIZERS["sgd"](model.parameters())
    step = mf.graph(model, made, placement=_all(), backend="aten", progress=False)(lambda x: model(x).sum())
    step(torch.ones(2, 8))


def _other_code() -> None:
    model = build("mlp")
    made = OPTIMIZERS["sgd"](model.parameters())
    scale = _rank() + 1
    mf.graph(model, made, placement=_all(), backend="aten", progress=False)(lambda x: model.fc1(x).sum() * scale)(torch.ones(2, 8))


def _other_parameters() -> None:
    step, model = _step(sync="error")
    with torch.no_grad():
        model.fc1.bias += _rank()
    step(*batch("mlp", 4))


def _only_later(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[], None]:
    def run() -> None:
        step, model = _step()
        for _ in range(2):
            step(*batch("mlp", 4))
        before = model.fc1.weight.detach().clone()
        try:
            step(*(change([*batch("mlp", 4)]) if _rank() == 1 else batch("mlp", 4)))
        finally:
            assert torch.equal(before, model.fc1.weight), "nothing has been changed"

    return run


def _later_number() -> None:
    model = build("mlp")
    made = OPTIMIZERS["sgd"](model.parameters())
    step = mf.graph(model, made, placement=_all(), backend="aten", progress=False)(training_step(model, made))
    step(*batch("mlp", 4))
    made.param_groups[0]["lr"] = 0.5 + _rank()
    step(*batch("mlp", 4))


def _module_without_a_shape() -> None:
    """At a later call, on one rank: a state that cannot be scanned."""
    step, model = _step()
    step(*batch("mlp", 4))
    if _rank() == 1:
        model.late = torch.nn.LazyLinear(3)
    step(*batch("mlp", 4))


CASES: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "rank that is not there": ("PlacementError", "rank(s) [5] do not exist", lambda: mf.placement("cpu", [0, 5])),
    "rank named twice": ("PlacementError", "rank(s) [0, 1] are named twice", lambda: mf.placement("cpu", [[0, 1], [1, 0]])),
    "no mesh": ("PlacementError", "full mesh", lambda: mf.placement("cpu", [[0, 1], [0]])),
    "unknown device": ("PlacementError", "unknown device type 'tpu'", lambda: mf.placement("tpu", [0, 1])),
    "no such dimension": ("SbpError", "S(2) splits a dimension that is not there", lambda: mf.distribute(torch.ones(2, 2), _all(), "S(2)")),
    "dimension of a scalar": ("SbpError", "no dimension to split", lambda: mf.distribute(torch.tensor(1.0), _all(), "S(0)")),
    "too many layouts": ("SbpError", "has 2 SBP(s)", lambda: mf.distribute(torch.ones(2, 2), _all(), ["S(0)", "B"])),
    "not an SBP": ("SbpError", "not an SBP: 'X'", lambda: mf.distribute(torch.ones(2, 2), _all(), "X")),
    "piece of another device": (
        "PlacementError",
        "the tensor is on meta",
        lambda: mf.to_global(torch.ones(2, 2, device="meta" if _rank() == 1 else "cpu"), _all(), "S(0)"),
    ),
    "piece of another width": ("RankError", "pieces of S(0)", lambda: mf.to_global(torch.ones(2, 2 + _rank()), _all(), "S(0)")),
    "piece of another rank": ("RankError", "pieces of S(0)", lambda: mf.to_global(torch.ones([2] * (2 + _rank())), _all(), "S(0)")),
    "piece of another dtype": (
        "RankError",
        "dtype differs between ranks: torch.float32 on rank 0, torch.float64 on rank 1",
        lambda: mf.to_global(torch.ones(2, dtype=torch.float64 if _rank() else torch.float32), _all(), "S(0)"),
    ),
    "piece of another length": ("RankError", "not cut as torch.chunk cuts", lambda: mf.to_global(torch.ones(2 + _rank()), _all(), "S(0)")),
    "whole of another length": ("RankError", "differ only in dimensions", lambda: mf.to_global(torch.ones(2 + _rank()), _all(), "B")),
    "other SBP on one rank": ("RankError", "sbp differs", lambda: mf.to_global(torch.ones(2), _all(), "B" if _rank() else "S(0)")),
    "wrong SBP on one rank": ("SbpError", "S(3)", lambda: mf.to_global(torch.ones(2), _all(), "S(3)" if _rank() else "S(0)")),
    "no SBP": ("SbpError", "needs sbp=", lambda: mf.to_global(torch.ones(2), _all())),
    "local piece of a plain tensor": ("PlacementError", "a plain one", lambda: mf.to_local(torch.ones(2))),
    "pattern that fits nothing": ("LayoutError", "'*.nothing'", lambda: _step(layout={"*.nothing": "S(0)"})[0](*batch("mlp", 4))),
    "pattern with too many layouts": (
        "SbpError",
        "layout pattern 'fc1.*'",
        lambda: _step(layout={"fc1.*": ["S(0)", "B"]})[0](*batch("mlp", 4)),
    ),
    "module pattern": ("LayoutError", "'nothing'", lambda: mf.distribute(build("mlp"), _all(), {"nothing": "B"})),
    "other model": ("RankError", "differs between ranks 0 and 1", _other_model),
    "other code": ("RankError", "differs between ranks 0 and 1", _other_code),
    "other parameters": ("RankError", "fc1.bias", _other_parameters),
    "other batch width": (
        "RankError",
        "argument inputs.0 has shape",
        lambda: _step()[0](torch.ones(4, 8 + _rank()), torch.zeros(4).long()),
    ),
    "other dtype": ("RankError", "torch.float64", _only_later(lambda b: [b[0].double(), b[1]])),
    "other width later": ("RankError", "argument inputs.0 has shape", _only_later(lambda b: [b[0][:, :5], b[1]])),
    "other number of arguments": ("RankError", "2 argument values on rank 0, with 3 on rank 1", _only_later(lambda b: [*b, b[0]])),
    "other device": ("PlacementError", "argument inputs.0 is on meta", _only_later(lambda b: [b[0].to("meta"), b[1]])),
    "other length of one argument": ("ValueError", "batch_size (7)", _only_later(lambda b: [b[0][:3], b[1]])),
    "other learning rate": ("RankError", "lr", _later_number),
    "other module later": ("StepError", "lazy parameters without a shape", _module_without_a_shape),
    "inputs that do not fit": ("SbpError", "S(5)", lambda: _step(inputs="S(5)")[0](*batch("mlp", 4))),
}


def try_all() -> dict[str, tuple[str, str]]:
    """What each case raises on this rank; the ranks go on together after each."""
    mf.placement.all("cpu").mesh()
    found = {}
    for name, (_, _, case) in CASES.items():
        try:
            case()
            found[name] = ("nothing", "")
        except Exception as exc:
            found[name] = (type(exc).__name__, str(exc))
    return found


@pytest.fixture(scope="module")
def tried() -> list[dict[str, tuple[str, str]]]:
    return run_on(2, "tests.test_bad_inputs:try_all", timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_an_error_on_every_rank(name: str, tried: list[dict[str, tuple[str, str]]]) -> None:
    kind, text, _ = CASES[name]
    raised = [rank[name] for rank in tried]
    assert all(found in (kind, "RankError") for found, _ in raised), raised
    assert any(found == kind and text in message for found, message in raised), raised
    assert all(text in message for _, message in raised)


def uncaught(name: str) -> None:
    _all().mesh()
    CASES[name][2]()


@pytest.mark.parametrize("name", ["other width later", "piece of another dtype"])
def test_an_uncaught_error_ends_every_process(name: str) -> None:
    with pytest.raises(ProcessesFailed) as caught:
        run_on(2, "tests.test_bad_inputs:uncaught", name, timeout=60)
    assert caught.value.codes == [1, 1]
    assert all("RankError" in text for text in caught.value.errors)
