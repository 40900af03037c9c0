"""Every op knows its line, its module, its phase and, in the backward, its forward op."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import marked
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import monoflow as mf
from monoflow import OpInfo, StepGraph


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # MARK: qkv
        weights = (q @ k.transpose(-2, -1)).softmax(-1)  # MARK: softmax
        return self.out(weights @ v)  # MARK: out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))  # MARK: residual
        return x + self.mlp(x)  # MARK: mlp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)  # MARK: table
        for block in self.blocks:
            x = block(x)  # MARK: block
        return self.head(x)  # MARK: head


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


@mf.graph(model, optimizer, backend="aten", progress=False)
def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(x)  # MARK: model
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())  # MARK: loss
    loss.backward()  # MARK: backward
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # MARK: clip
    optimizer.step()  # MARK: update
    optimizer.zero_grad()
    return loss


@functools.lru_cache
def graph() -> StepGraph:
    return train.graph_for(torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5)))


def calls(captured: StepGraph | None = None) -> list[fx.Node]:
    return [n for n in (captured or graph()).graph.nodes if n.op == "call_function"]


def info(node: fx.Node) -> OpInfo:
    found = node.meta["op"]
    assert isinstance(found, OpInfo)
    return found


def named(*targets: Any, phase: str | None = None, captured: StepGraph | None = None) -> list[fx.Node]:
    return [n for n in calls(captured) if n.target in targets and phase in (None, info(n).phase)]


def line(frame: mf.Frame | None) -> int:
    assert frame is not None and frame.file == __file__, frame
    return frame.line


def at(name: str) -> int:
    return marked(__file__, name)[0]


aten = torch.ops.aten


def test_every_op_has_a_line_of_the_user() -> None:
    for node in calls():
        found = info(node)
        assert found.source, node.format_node()
        first = next(frame for frame in found.source if not frame.installed)
        assert first.file == __file__ and first.text and first.function, node.format_node()
        assert found.user is not None


def test_the_line_of_the_loss() -> None:
    (node,) = named(aten._log_softmax.default, aten.nll_loss_forward.default)[:1]
    assert line(info(node).user) == at("loss")
    assert info(node).user is not None and info(node).user.text.startswith("loss = F.cross_entropy(")  # type: ignore[union-attr]
    assert info(node).user.function == "train"  # type: ignore[union-attr]


def test_the_lines_inside_modules() -> None:
    (table,) = named(aten.embedding.default)
    assert (info(table).module, line(info(table).user)) == ("table", at("table"))
    softmax = named(aten._softmax.default)
    assert [info(n).module for n in softmax] == ["blocks.0.attention", "blocks.1.attention"]
    assert {line(info(n).user) for n in softmax} == {at("softmax")}
    gelu = named(aten.gelu.default)
    assert [info(n).module for n in gelu] == ["blocks.0.mlp.1", "blocks.1.mlp.1"]
    assert {line(info(n).user) for n in gelu} == {at("mlp")}
    norms = named(aten.native_layer_norm.default)
    assert [info(n).module for n in norms] == ["blocks.0.norm", "blocks.1.norm"]


def test_the_whole_stack_of_a_line_inside_modules() -> None:
    frames = [f for f in info(named(aten._softmax.default)[1]).source if not f.installed]
    assert [f.line for f in frames] == [at("softmax"), at("residual"), at("block"), at("model")]
    assert [f.function for f in frames] == ["forward", "forward", "forward", "train"]


def test_library_frames_are_kept_and_folded() -> None:
    source = info(named(aten.gelu.default)[0]).source
    assert any(f.installed for f in source)
    assert not any("monoflow" in f.file and "/tests/" not in f.file for f in source)
    text = str(mf.errors.CaptureError("why", frames=source))
    assert "library frame(s)" in text and text.count("File ") == len([f for f in source if not f.installed])


def test_phases_come_in_order() -> None:
    phases = [info(n).phase for n in calls()]
    assert set(phases) == {"forward", "backward", "update"}
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)


def test_the_backward_starts_with_the_gradient_of_the_loss() -> None:
    (ones,) = named(aten.ones_like.default)
    found = info(ones)
    assert found.phase == "backward"
    assert found.forward is not None and found.forward.target == "aten.nll_loss_forward.default"
    assert line(found.user) == at("backward")
    assert line(next(f for f in found.forward.source if not f.installed)) == at("loss")


def test_every_backward_op_names_its_forward_op() -> None:
    by_name = {n.name: n for n in calls()}
    for node in calls():
        found = info(node)
        assert (found.forward is not None) == (found.phase == "backward"), node.format_node()
        if found.forward is not None:
            forward = by_name[found.forward.name]
            assert info(forward).phase == "forward"
            assert found.forward.source == info(forward).source
            assert found.forward.target == str(forward.target) and forward.target is not operator.getitem


def test_the_gradient_of_a_softmax_is_at_the_line_and_module_of_the_softmax() -> None:
    nodes = named(aten._softmax_backward_data.default)
    assert [info(n).module for n in nodes] == ["blocks.1.attention", "blocks.0.attention"]
    for node in nodes:
        assert line(info(node).user) == at("softmax")
        assert info(node).forward.target == "aten._softmax.default"  # type: ignore[union-attr]
        assert line(next(f for f in info(node).source if not f.installed)) == at("backward")


def test_the_gradients_of_layers_are_in_their_modules() -> None:
    pairs = {
        aten.gelu_backward.default: ["blocks.1.mlp.1", "blocks.0.mlp.1"],
        aten.native_layer_norm_backward.default: ["blocks.1.norm", "blocks.0.norm"],
        aten.embedding_dense_backward.default: ["table"],
    }
    for target, modules in pairs.items():
        assert [info(n).module for n in named(target)] == modules
    matrix = named(aten.mm.default, phase="backward")
    assert {info(n).module for n in matrix} >= {"head", "blocks.0.attention.qkv", "blocks.1.mlp.2"}


def test_clipping_is_part_of_the_update() -> None:
    nodes = named(aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)
    assert nodes
    for node in nodes:
        assert info(node).phase == "update" and info(node).module == ""
        assert line(info(node).user) == at("clip")


def test_the_optimizer_is_the_update() -> None:
    nodes = [n for n in calls() if info(n).phase == "update" and line(info(n).user) == at("update")]
    assert {n.target for n in nodes} >= {aten.addcdiv_.default, aten.lerp_.Scalar}
    assert {line(info(n).user) for n in calls() if info(n).phase == "update"} == {at("clip"), at("update")}


def test_printing_shows_the_line_over_each_op() -> None:
    text = graph().print_readable(print_output=False)
    assert text.startswith("def step(")
    for mark in ("qkv", "softmax", "loss", "clip", "update"):
        number, code = marked(__file__, mark)
        assert f"{__file__}:{number}  {code}" in text
    assert "[backward blocks.1.attention]" in text
    assert "(gradient of" in text and "aten._softmax.default)" in text
    assert "site-packages" not in text, "library frames are folded"


# Other kinds of steps


def each(body: Callable[..., Any], *args: Any, state: tuple[Any, ...] = ()) -> list[fx.Node]:
    return calls(mf.graph(*state, backend="aten", progress=False)(body).graph_for(*args))


def test_losses_and_updates_by_hand() -> None:
    weight = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight])

    def step(x: torch.Tensor) -> None:
        loss = (weight * x).square().mean()
        loss.backward()
        scale = 1 / (weight.grad.norm() + 1e-6)  # MARK: scale
        with torch.no_grad():
            weight.sub_(weight.grad * scale, alpha=0.1)  # MARK: by hand
        weight.grad = None

    nodes = each(step, torch.ones(3), state=(sgd,))
    assert {line(info(n).user) for n in nodes if info(n).phase == "update"} == {at("scale"), at("by hand")}


def test_second_derivatives() -> None:
    layer = nn.Linear(3, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(layer(x)).sum()  # MARK: first
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        loss = slope.square().sum()  # MARK: penalty
        loss.backward()  # MARK: second
        return loss

    nodes = each(step, torch.ones(2, 3, requires_grad=True), state=(layer,))
    backward = [n for n in nodes if info(n).phase == "backward"]
    assert all(info(n).forward is not None for n in backward)
    assert {line(info(n).user) for n in backward} >= {at("first"), at("penalty")}


def test_recomputed_ops_are_in_their_module() -> None:
    block = Block(8)

    def step(x: torch.Tensor) -> None:
        checkpoint(block, x, use_reentrant=False).sum().backward()

    nodes = each(step, torch.randn(2, 5, 8), state=(block,))
    softmax = [n for n in nodes if n.target is aten._softmax.default]
    assert [info(n).module for n in softmax] == ["attention", "attention"]
    assert [info(n).phase for n in softmax] == ["forward", "backward"]
    assert all(line(info(n).user) == at("softmax") for n in softmax)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2  # MARK: double

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3  # MARK: gradient of double


def test_an_autograd_function_of_the_user() -> None:
    def step(x: torch.Tensor) -> Any:
        Double.apply(x).sum().backward()  # MARK: apply
        return x.grad

    nodes = each(step, torch.ones(2, requires_grad=True))
    by_line = {line(next(f for f in info(n).source if not f.installed)): info(n) for n in nodes}
    assert by_line[at("double")].phase == "forward"
    found = by_line[at("gradient of double")]
    assert found.phase == "backward" and found.forward is not None
    assert line(next(f for f in found.forward.source if not f.installed)) == at("double")


def test_several_modules_have_their_names() -> None:
    first, second = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    nodes = each(lambda x: second(first(x)), torch.ones(2, 3), state=(first, second))
    assert [info(n).module for n in nodes if n.target is aten.addmm.default] == ["0", "model1.0"]


@pytest.mark.parametrize("kind", ["foreach", "fused", "for loop"])
def test_every_kind_of_optimizer_step(kind: str) -> None:
    layer = nn.Linear(3, 3)
    adam = torch.optim.Adam(layer.parameters(), **({} if kind == "for loop" else {kind: True}))

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        adam.step()  # MARK: adam
        adam.zero_grad()

    nodes = each(step, torch.ones(2, 3), state=(layer, adam))
    update = [n for n in nodes if info(n).phase == "update"]
    assert update and {line(info(n).user) for n in update} == {at("adam")}
