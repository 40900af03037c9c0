"""The compile room below Inductor: bindings, programs, simplification, clustering, fusion, regions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_gpt import TinyGPT, batch, step_of
from torch import fx, nn

import monoflow as mf
from monoflow.compile.bindings import Bindings
from monoflow.compile.cluster import cluster
from monoflow.compile.functionalize import functionalize
from monoflow.compile.fuse import fuse_clipping, fuse_optimizers
from monoflow.compile.program import compile_program
from monoflow.compile.regions import Region, compilable, plan_regions, region_key
from monoflow.compile.reuse import reuse_memory
from monoflow.compile.simplify import simplify

aten = torch.ops.aten


def captured(layers: int = 3, dropout: float = 0.0, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> fx.Graph:
    model = TinyGPT(layers, dropout=dropout)
    opt = optimizer(model.parameters(), lr=1e-2, **options)
    return mf.graph(model, opt)(step_of(model, opt)).graph_for(*batch(0)).graph


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


# Bindings


def test_common_ops_get_pytorchs_own_binding_and_rare_ones_the_overload() -> None:
    graph = simplify(captured())
    bindings = Bindings()
    chosen = {str(n.target): bindings.function(n) for n in graph.nodes if n.op == "call_function" and bindings.infix(n) is None}
    assert chosen["aten.mm.default"] is torch._C._VariableFunctions.mm
    assert chosen["aten.add_.Tensor"] in (torch.Tensor.add_, torch._C.TensorBase.add_)
    assert chosen["aten.native_layer_norm_backward.default"] is aten.native_layer_norm_backward.default


def test_a_binding_that_dispatches_to_another_overload_is_not_used() -> None:
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        value = torch.zeros(3, 4)
    x = graph.placeholder("x")
    x.meta["val"] = value
    summed = graph.call_function(aten.sum.dim_IntList, (x, None))  # torch.sum(x, None) is not the same call
    summed.meta["val"] = value
    function = Bindings().function(summed)
    assert torch.equal(function(torch.ones(3, 4), None), torch.tensor(12.0))


# Programs


def test_a_program_frees_values_after_their_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        alive.append(weakref.ref(made))
        return made

    def count(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        seen.append(sum(ref() is not None for ref in alive))
        return x

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(4):
        value = graph.call_function(count, (graph.call_function(make, (value,)),))
    graph.output((value,))
    compile_program(graph, Bindings())([torch.zeros(2)])
    assert seen == [1, 1, 1, 1]


def test_arguments_of_all_kinds_reach_the_op() -> None:
    got: list[Any] = []
    graph = fx.Graph()
    x = graph.placeholder("def_")
    options = {"a": float("inf"), "b": [1, (2.5, None)], "c": {"d": torch.float16}, "e": slice(1, 2)}
    graph.output((graph.call_function(lambda *args, **kwargs: got.append((args, kwargs)), ((x, "text"), True), options),))
    compile_program(graph, Bindings())([7])
    assert got == [(((7, "text"), True), options)]


# Simplification and clustering: the same numbers to the bit, fewer ops


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.NAdam])
def test_simplified_and_clustered_graph_equals_the_captured_one(optimizer: Callable[..., Any]) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1} if optimizer is torch.optim.SGD else {}
    plain = captured(2, optimizer=optimizer, **options)
    clustered = simplify(plain)
    cluster(clustered)
    clustered.lint()
    assert sum(n.op == "call_function" for n in clustered.nodes) < 0.8 * sum(n.op == "call_function" for n in plain.nodes)
    values = [_value(n) for n in plain.find_nodes(op="placeholder")]
    results = []
    for graph in (plain, clustered):
        inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        with torch.no_grad():
            outputs = compile_program(graph, Bindings())(list(inputs))
        results.append([v for v in [*inputs, *outputs] if isinstance(v, torch.Tensor)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


def _value(node: fx.Node) -> Any:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.rand(value.shape) + 0.1 if value.dim() else torch.tensor(3.0, dtype=value.dtype)
    return torch.randint(0, 20, value.shape)


def test_large_tensors_keep_the_order_of_the_optimizer() -> None:
    """Run in lockstep, a temporary of every large parameter would be alive at once."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 1))
    opt = torch.optim.AdamW(model.parameters())

    @mf.graph(model, opt)
    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()

    graph = simplify(train.graph_for(torch.ones(2, 300)).graph)
    cluster(graph)
    large = [n for n in graph.nodes if n.target in (aten.sqrt.default, aten.addcdiv_.default)]
    assert [n.target for n in large if n.meta["val"].numel() == 90000] == [aten.sqrt.default, aten.addcdiv_.default] * 2
    assert calls(graph, aten._foreach_addcdiv_.ScalarList)


def test_norms_over_dimensions_are_not_merged() -> None:
    weights = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    holder = nn.ParameterList(weights)
    opt = torch.optim.Adafactor(holder.parameters())

    @mf.graph(holder, opt, backend="aten")
    def train(x: torch.Tensor) -> None:
        sum((w * x).sum() for w in holder).backward()
        opt.step()
        opt.zero_grad()

    twins = [nn.Parameter(w.detach().clone()) for w in weights]
    twin_opt = torch.optim.Adafactor(twins)
    x = torch.randn(3, 4)
    for _ in range(2):
        train(x)
        sum((w * x).sum() for w in twins).backward()
        twin_opt.step()
        twin_opt.zero_grad()
    for ours, plain in zip(weights, twins, strict=True):
        assert torch.equal(ours, plain)


# Reuse of memory


def reused(step: Callable[..., Any], *args: torch.Tensor) -> tuple[fx.Graph, list[Any]]:
    graph = simplify(mf.graph()(step).graph_for(*args).graph)
    reuse_memory(graph)
    graph.lint()
    return graph, [n.target for n in graph.nodes if n.op == "call_function"]


def test_an_elementwise_op_writes_into_an_input_that_ends_there() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return ((x.exp() + x) * 2).neg()

    _, targets = reused(step, torch.randn(3, 4))
    assert targets == [aten.exp.default, aten.add_.Tensor, aten.mul_.Tensor, aten.neg_.default]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + 1,  # an argument
        lambda x: (h := x.exp(), h + 1),  # returned
        lambda x: (h := x.exp()).add(1) * h,  # used later
        lambda x: (h := x.exp(), v := h.t(), h + 1, v * 2)[2:],  # its view is used later
        lambda x: (h := x.exp()) + h.t(),  # its view is the other operand
        lambda x: x[0].exp() + x,  # broadcast
        lambda x: x.exp().to(torch.int64) + x,  # another dtype
        lambda x: x[:, :2].exp().expand(2, 4, 2) + 1,  # overlapping
    ],
)
def test_memory_that_is_seen_otherwise_is_not_reused(step: Callable[..., Any]) -> None:
    x = torch.randn(4, 4)
    wanted = step(x.clone())
    model = nn.Identity()
    got = mf.graph(model, backend="aten")(step)(x)
    for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (wanted, got)], strict=True):
        assert torch.equal(a, b)
    _, targets = reused(step, x)
    assert aten.add_.Tensor not in targets


# Fusion


@pytest.mark.parametrize(
    ("optimizer", "options", "fused"),
    [
        (torch.optim.AdamW, {}, aten._fused_adamw_.default),
        (torch.optim.AdamW, {"weight_decay": 0.0}, aten._fused_adam_.default),
        (torch.optim.Adam, {}, aten._fused_adam_.default),
        (torch.optim.Adam, {"weight_decay": 0.1}, aten._fused_adam_.default),
    ],
)
def test_adam_chains_become_one_fused_op_that_also_clips(optimizer: Any, options: dict[str, Any], fused: Any) -> None:
    graph = simplify(captured(2, optimizer=optimizer, **options))
    fuse_optimizers(graph)
    fuse_clipping(graph)
    graph.lint()
    (node,) = calls(graph, fused)
    assert len(node.args[0]) == len(list(TinyGPT(2).parameters()))
    assert node.kwargs["grad_scale"].target is aten.reciprocal.default
    assert not calls(graph, aten.addcdiv_.default) and not calls(graph, aten.mul_.Tensor)


def test_amsgrad_is_left_as_it_is() -> None:
    graph = simplify(captured(1, amsgrad=True))
    before = len(graph.nodes)
    fuse_optimizers(graph)
    assert len(graph.nodes) == before


def test_a_gradient_looked_at_after_clipping_is_clipped_by_then() -> None:
    model = TinyGPT(1)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    @mf.graph(model, opt)
    def train(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        largest = model.head.weight.grad.abs().max()
        opt.step()
        return largest

    graph = simplify(train.graph_for(*batch(0)).graph)
    fuse_optimizers(graph)
    fuse_clipping(graph)
    assert "grad_scale" not in calls(graph, aten._fused_adamw_.default)[0].kwargs


def test_groups_with_their_own_options_stay_apart() -> None:
    model = TinyGPT(1)
    opt = torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.1}], lr=0.01)
    model.embed.requires_grad_(False)
    model.norm.requires_grad_(False)
    graph = simplify(mf.graph(model, opt)(step_of(model, opt)).graph_for(*batch(0)).graph)
    fuse_optimizers(graph)
    lists = sorted(len(n.args[0]) for n in calls(graph, aten._fused_adamw_.default))
    assert lists == [1, 12]


# Regions


def planned(layers: int, dropout: float = 0.0) -> list[Region | fx.Node]:
    graph = simplify(captured(layers, dropout, fused=True))
    functionalize(graph, compilable)
    return list(plan_regions(graph).parts)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_repeated_blocks_are_equal_regions(dropout: float) -> None:
    few = {region_key(p) for p in planned(2, dropout) if isinstance(p, Region)}
    many = [region_key(p) for p in planned(6, dropout) if isinstance(p, Region)]
    assert set(many) == few
    assert sorted(many.count(key) for key in few)[-2:] == [6, 6]  # forward and backward of a block


def test_random_draws_keep_their_order_and_stay_outside_of_regions() -> None:
    graph = simplify(captured(2, 0.1, fused=True))
    draws = [n.meta["op"].module for n in graph.nodes if n.target is aten.bernoulli_.float]
    functionalize(graph, compilable)
    parts = plan_regions(graph).parts
    assert [p.meta["op"].module for p in parts if isinstance(p, fx.Node) and p.target is aten.bernoulli_.float] == draws
    assert not any(n.target is aten.bernoulli_.float for p in parts if isinstance(p, Region) for n in p.nodes)


def test_every_part_comes_after_what_it_needs() -> None:
    done: set[fx.Node] = set()
    for part in planned(3, 0.1):
        nodes = part.nodes if isinstance(part, Region) else (part,)
        for node in nodes:
            assert all(n in done or n.op == "placeholder" for n in node.all_input_nodes)
            done.add(node)


def test_writes_into_fresh_tensors_become_functional_and_others_stay() -> None:
    model = nn.Linear(4, 4)
    memory = torch.zeros(4)

    @mf.graph(model)
    def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fresh = model(x).relu_()
        base = x * 2
        view = base[0]
        view.add_(1)
        memory.mul_(2)
        return fresh, base, view

    graph = simplify(evaluate.graph_for(torch.ones(3, 4)).graph)
    functionalize(graph, compilable)
    targets = [n.target for n in graph.nodes]
    assert aten.relu.default in targets and aten.relu_.default not in targets
    assert aten.add_.Tensor in targets  # `base` sees it
    assert aten.mul_.Tensor in targets  # so does the tensor outside


def test_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(mf.errors.StepError, match="'auto', 'aten', 'inductor'"):
        mf.graph(nn.Linear(1, 1), backend="turbo")(lambda x: x)
