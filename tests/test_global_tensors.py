"""Global tensors on real processes: made, laid out anew, taken apart, with gradients; factories; rules registered by users."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

import monoflow as mf
from tests.parallel_models import build
from tests.processes import run_on


def _whole() -> Tensor:
    return torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))


def round_trips(mesh: Any) -> list[str]:
    """Every pair of layouts: what came out wrong."""
    placement = mf.placement("cpu", mesh)
    wrong = []
    choices = ["S(0)", "S(-1)", "B", "P", "P(max)"] if placement.ndim == 1 else ["S(0)", "S(-1)", "B", "P"]
    layouts = [list(c) for c in itertools.product(choices, repeat=placement.ndim)]
    for first in layouts:
        g = mf.distribute(_whole(), placement, first)
        if not torch.allclose(g.full_tensor(), _whole()):
            wrong.append(f"distribute {first}")
        if mf.placement.of(g) != placement or [str(s) for s in mf.sbp.of(g)] != [c.replace("-1", "2") for c in first]:
            wrong.append(f"of {first}: {mf.sbp.of(g)}")
        again = mf.to_global(mf.to_local(g), placement, first)
        if not torch.equal(again.full_tensor(), g.full_tensor()):
            wrong.append(f"pieces {first}")
        for second in layouts:
            if not torch.allclose(mf.to_global(g, sbp=second).full_tensor(), _whole(), atol=1e-6):
                wrong.append(f"{first} -> {second}")
    return wrong


@pytest.mark.parametrize("mesh", [[0, 1], [[0, 1], [2, 3]]], ids=str)
def test_layouts_keep_the_value(mesh: Any) -> None:
    for wrong in run_on(torch.tensor(mesh).numel(), "tests.test_global_tensors:round_trips", mesh):
        assert wrong == []


def gradients() -> list[str]:
    """Conversions of which the gradient is not that of the whole."""
    placement = mf.placement.all("cpu")
    weights = _whole().cos()
    wrong = []
    for first, second in itertools.product(["S(0)", "S(1)", "B"], ["S(0)", "S(1)", "B", "P"]):
        leaf = _whole().requires_grad_()
        g = mf.to_global(mf.distribute(leaf, placement, first), sbp=second)
        (g * mf.distribute(weights, placement, "B" if second == "P" else second)).sum().backward()
        grad = leaf.grad.full_tensor() if hasattr(leaf.grad, "full_tensor") else leaf.grad
        if not torch.allclose(grad, weights):
            wrong.append(f"{first} -> {second}")
        piece = mf.to_local(mf.distribute(_whole(), placement, first)).requires_grad_()
        (
            mf.to_global(mf.to_global(piece, placement, first), sbp=second)
            * mf.distribute(weights, placement, "B" if second == "P" else second)
        ).sum().backward()
        if not torch.allclose(piece.grad, mf.to_local(mf.distribute(weights, placement, first))):
            wrong.append(f"piece {first} -> {second}")
    return wrong


def test_conversions_are_differentiable() -> None:
    for wrong in run_on(2, "tests.test_global_tensors:gradients"):
        assert wrong == []


def made() -> dict[str, bool]:
    placement = mf.placement("cpu", [[0, 1], [2, 3]])
    placement.mesh()
    torch.manual_seed(7 if torch.distributed.get_rank() == 0 else 9)
    found = {}
    for sbp in (["S(0)", "B"], ["S(1)", "S(0)"], ["B", "B"], ["P", "S(1)"]):
        state = torch.Generator().manual_seed(7)
        torch.manual_seed(7)
        exact = mf.randn(5, 4, placement=placement, sbp=sbp)
        found[f"randn {sbp}"] = torch.allclose(exact.full_tensor(), torch.randn(5, 4, generator=state))
        fast = mf.rand(5, 4, placement=placement, sbp=sbp, random="fast").full_tensor()
        found[f"fast {sbp}"] = bool(((fast >= 0) & (fast < 1)).all()) and len(fast.unique()) == 20
        found[f"ones {sbp}"] = torch.equal(mf.ones(5, 4, placement=placement, sbp=sbp).full_tensor(), torch.ones(5, 4))
        found[f"tensor {sbp}"] = torch.equal(
            mf.tensor([[1, 2], [3, 4]], placement=placement, sbp=sbp).full_tensor(), torch.tensor([[1, 2], [3, 4]])
        )
    copies = [torch.empty(5, 2) for _ in range(4)]
    torch.distributed.all_gather(copies, mf.to_local(mf.rand(5, 4, placement=placement, sbp=["S(1)", "B"], random="fast")))
    found["equal on copies"] = torch.equal(copies[0], copies[1]) and torch.equal(copies[2], copies[3])
    found["other on pieces"] = not torch.equal(copies[0], copies[2])
    return found


def test_factories() -> None:
    for found in run_on(4, "tests.test_global_tensors:made"):
        assert [name for name, right in found.items() if not right] == []


def module() -> tuple[float, list[str], bool]:
    model = build("mlp")
    x, y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5
    model.eval()
    wanted = model(x, y)
    placement = mf.placement.all("cpu")
    mf.distribute(model, placement, {"fc1.*": "S(0)", "fc2.weight": "S(1)"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(mf.distribute(x, placement, "B"), mf.distribute(y, placement, "B"))
    loss.backward()
    optimizer.step()
    return float(loss.full_tensor() - wanted), [str(mf.sbp.of(p)) for p in model.parameters()], isinstance(model.fc1.weight, nn.Parameter)


def test_a_module_is_distributed() -> None:
    for difference, layouts, is_parameter in run_on(2, "tests.test_global_tensors:module"):
        assert abs(difference) < 1e-6 and is_parameter
        assert layouts == ["(S(0),)", "(S(0),)", "(S(1),)", "(B,)"]


class Pinned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(mf.to_global(torch.relu(self.fc1(x)), sbp="S(1)"))


def test_a_pin_inside_a_step() -> None:
    """On one device it does nothing; over ranks the value lies as it says, and the numbers stay."""
    torch.manual_seed(0)
    model = Pinned()
    x = torch.randn(6, 8)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    wanted = float(step(x).detach())
    gradient = model.fc1.weight.grad.clone()
    model.zero_grad()
    alone = mf.graph(model, backend="aten", progress=False)(step)
    assert float(alone(x)) == wanted
    assert torch.equal(model.fc1.weight.grad, gradient)
    model.zero_grad()
    with mf.simulate(2):
        over = mf.graph(model, placement=mf.placement.all("cpu"), backend="aten", progress=False)(step)
        assert abs(float(over(x)) - wanted) < 1e-6
        graph = over.laid_out(x).captured.graph.graph
    assert torch.allclose(model.fc1.weight.grad, gradient, atol=1e-6)
    (pin,) = graph.find_nodes(op="call_function", target=torch.ops.monoflow.layout_hint.default)
    assert str(pin.meta["layout"]) == "(S(1),)"


def test_a_pin_that_does_not_fit_names_its_line() -> None:
    model = nn.Linear(4, 4)
    with mf.simulate(2):
        step = mf.graph(model, placement=mf.placement.all("cpu"), progress=False)(lambda x: mf.to_global(model(x), sbp="S(7)").sum())
        with pytest.raises(mf.errors.SbpError, match=r"test_global_tensors\.py:\d+.*S\(7\) splits a dimension that is not there"):
            step(torch.ones(2, 4))


def test_a_layout_pass_changes_layouts() -> None:
    model = nn.Linear(4, 6)
    seen = []

    def shard(laid: Any) -> None:
        seen.append(str(laid.layout("weight")))
        laid.pin("weight", "S(0)")

    with mf.simulate(2):
        step = mf.graph(model, placement=mf.placement.all("cpu"), passes=[mf.on_layout(shard)], progress=False)(lambda x: model(x).sum())
        laid = step.laid_out(torch.ones(2, 4))
    assert seen == ["(B,)"]
    assert str(laid.layout("weight")) == "(S(0),)"
    with pytest.raises(mf.errors.LayoutError, match="no tensor 'nothing'"):
        laid.layout("nothing")


@library.custom_op("monoflow_tests::row_norm", mutates_args=())
def row_norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


@row_norm.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@library.custom_op("monoflow_tests::shift", mutates_args=())
def shift(x: Tensor) -> Tensor:
    return x.roll(1)


@shift.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_registered_rule_is_used() -> None:
    with mf.simulate(2):
        step = mf.graph(placement=mf.placement.all("cpu"), progress=False)(lambda x: row_norm(x))
        x = torch.randn(4, 3)
        with pytest.warns(mf.errors.LayoutWarning, match=r"row_norm.*test_global_tensors\.py:\d+"):
            assert torch.allclose(step(x), row_norm(x))
        for bad, why in [("b n, b n -> b", "1 tensor argument"), ("b n", "exactly one")]:
            with pytest.raises(mf.errors.RuleError, match=why):
                mf.register_rule("monoflow_tests::row_norm", bad)
        mf.register_rule("monoflow_tests::row_norm", "b n! -> b n")
        again = mf.graph(placement=mf.placement.all("cpu"), progress=False)(lambda x: row_norm(x))
        assert str(again.laid_out(x).outputs) == "((S(0),),)"
        with pytest.raises(mf.errors.RuleError, match="has a layout rule"):
            mf.register_rule("monoflow_tests::row_norm", "b n -> b n")
    with pytest.raises(mf.errors.RuleError, match="full name"):
        mf.register_rule("mm", "a b, b c -> a c")


def test_an_op_without_a_rule_warns_once() -> None:
    with mf.simulate(2), pytest.warns(mf.errors.LayoutWarning) as caught:
        step = mf.graph(placement=mf.placement.all("cpu"), progress=False)(lambda x: shift(x) + shift(x * 2))
        step(torch.randn(4))
    assert len([w for w in caught if "shift" in str(w.message)]) == 1


EAGER_OPS: dict[str, Any] = {
    "cdist": (lambda a, b: torch.cdist(a, b), [(6, 4), (5, 4)]),
    "addbmm": (lambda a, b, c: torch.addbmm(a, b, c), [(6, 4), (2, 6, 3), (2, 3, 4)]),
    "mv": (lambda a, b: torch.mv(a, b), [(6, 4), (4,)]),
    "reflect": (lambda a: F.pad(a, (2, 1), mode="reflect"), [(4, 6, 5)]),
    "hardswish": (lambda a: F.hardswish(a), [(6, 4)]),
    "mish": (lambda a: F.mish(a), [(6, 4)]),
    "avg_pool2d": (lambda a: F.avg_pool2d(a, 2), [(2, 3, 6, 4)]),
    "complex": (lambda a, b: torch.complex(a, b).real, [(6, 4), (6, 4)]),
}


def eager_ops() -> dict[str, str]:
    """Ops for which DTensor has no rule, under layouts of their arguments: what came out wrong."""
    placement = mf.placement.all("cpu")
    wrong = {}
    generator = torch.Generator().manual_seed(0)
    for name, (function, shapes) in EAGER_OPS.items():
        whole = [torch.randn(s, generator=generator) for s in shapes]
        for sbp in ("S(0)", "S(1)", "B"):
            given = [w.clone().requires_grad_() for w in whole]
            wanted = function(*given)
            wanted.square().sum().backward()
            pieces = [mf.distribute(w, placement, sbp if w.dim() > 1 else "B").detach().requires_grad_() for w in whole]
            try:
                got = function(*pieces)
                got.square().sum().backward()
                right = torch.allclose(got.full_tensor(), wanted, atol=1e-5)
                right = right and all(torch.allclose(p.grad.full_tensor(), w.grad, atol=1e-5) for p, w in zip(pieces, given, strict=True))
            except Exception as exc:
                right, wrong[f"{name} {sbp} raised"] = False, f"{type(exc).__name__}: {exc}"
            if not right:
                wrong[f"{name} {sbp}"] = "differs"
    return wrong


def test_eager_ops_without_a_rule_of_pytorch_have_ours() -> None:
    for wrong in run_on(2, "tests.test_global_tensors:eager_ops"):
        assert wrong == {}
