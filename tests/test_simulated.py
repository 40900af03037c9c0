"""Training steps over simulated ranks: the numbers are those of one device, and the communication is what it has to be."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import monoflow as mf
from benchmarks.small_models import GPT, TENSOR_PARALLEL, batch
from monoflow.placement import Placement
from monoflow.world import simulate
from tests.parallel_models import OPTIMIZERS, build, largest_difference, reference, training_step


def train(name: str, mesh: Any, layout: Any, optimizer: str, size: int = 12, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """The largest relative differences to one device, in the losses of three steps and in the model after."""
    model = build(name, dtype)
    inputs = batch(name, size, dtype)
    losses, expected = reference(model, optimizer, inputs, 3)
    model = copy.deepcopy(model)
    made = OPTIMIZERS[optimizer](model.parameters())
    with simulate(torch.tensor(mesh).numel()):
        step = mf.graph(model, made, placement=Placement("cpu", mesh), layout=layout, backend="aten", progress=False)(
            training_step(model, made)
        )
        torch.manual_seed(5)
        got = [float(step(*inputs)) for _ in range(3)]
    assert step.graphs_made == 1
    return max(abs(a - b) / abs(a) for a, b in zip(losses, got, strict=True)), largest_difference(expected, model)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_data_parallel(name: str, optimizer: str) -> None:
    loss, model = train(name, [0, 1], {}, optimizer)
    assert loss < 1e-5 and model < 1e-5


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_data_parallel_in_double(name: str) -> None:
    loss, model = train(name, [0, 1, 2], {}, "sgd", dtype=torch.float64)
    assert loss < 1e-12 and model < 1e-12


@pytest.mark.parametrize("size", [5, 7, 1])
def test_batches_that_do_not_divide(size: int) -> None:
    loss, model = train("gpt", [0, 1, 2], {}, "sgd", size)
    assert loss < 1e-5 and model < 1e-5


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_data_and_tensor_parallel(name: str, optimizer: str) -> None:
    loss, model = train(name, [[0, 1], [2, 3]], TENSOR_PARALLEL[name], optimizer)
    assert loss < 1e-5 and model < 1e-5


def plan_of(layers: int, mesh: Any, layout: Any) -> mf.Plan:
    model = GPT(layers)
    made = OPTIMIZERS["sgd"](model.parameters())
    with simulate(torch.tensor(mesh).numel()):
        step = mf.graph(model, made, placement=Placement("cpu", mesh, names=("dp", "tp")), layout=layout, progress=False)(
            training_step(model, made)
        )
        return step.plan(*batch("gpt", 4))


def test_megatron_has_two_all_reduces_per_block_and_direction() -> None:
    """Of activations: what one block more adds, over the tensor dimension."""
    counts = []
    for layers in (1, 3):
        plan = plan_of(layers, [[0, 1]], TENSOR_PARALLEL["gpt"])
        assert {c.kind for c in plan.collectives if ".blocks" in c.module or "blocks" in c.module} <= {"all-reduce"}
        counts.append(Counter(c.phase for c in plan.collectives if c.mesh_dim == "tp" and c.kind == "all-reduce" and "blocks" in c.module))
    assert {phase: counts[1][phase] - counts[0][phase] for phase in ("forward", "backward")} == {"forward": 4, "backward": 4}


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_data_parallel_sends_twice_the_parameters(ranks: int) -> None:
    model = build("mlp")
    made = OPTIMIZERS["sgd"](model.parameters())
    with simulate(ranks):
        step = mf.graph(model, made, placement=Placement.all("cpu"), progress=False)(training_step(model, made))
        plan = step.plan(*batch("mlp", 64))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    scalars = sum(c.sent for c in plan.collectives if c.size <= 8)
    assert abs(plan.bytes_sent - scalars - 2 * (ranks - 1) / ranks * parameters) <= 2 * len(plan.collectives)


def test_split_vocabulary_never_holds_the_whole_logits() -> None:
    model = GPT(1, width=24, vocabulary=96)
    made = OPTIMIZERS["sgd"](model.parameters())
    with simulate(2):
        placement = Placement("cpu", [[0, 1]])
        step = mf.graph(model, made, placement=placement, layout=TENSOR_PARALLEL["gpt"], progress=False)(training_step(model, made))
        laid = step.laid_out(*batch("gpt", 4))
        local = step._parallel.local_graph(laid, (0, 0))
    shapes = [tuple(v.shape) for n in local.nodes for v in [n.meta.get("val")] if isinstance(v, torch.Tensor)]
    assert (32, 48) in shapes
    assert not {(32, 96), (4, 8, 96)} & set(shapes)


def test_loaded_optimizer_state_is_used() -> None:
    """load_state_dict leaves other tensors in the optimizer; the step goes on from them."""
    model = build("mlp")
    inputs = batch("mlp", 6)
    made = OPTIMIZERS["sgd"](model.parameters())
    plain = copy.deepcopy(model)
    other = OPTIMIZERS["sgd"](plain.parameters())
    reference_step = training_step(plain, other)
    with simulate(2):
        step = mf.graph(model, made, placement=Placement.all("cpu"), backend="aten", progress=False)(training_step(model, made))
        for run in (step, reference_step):
            torch.manual_seed(5)
            run(*inputs)
            run(*inputs)
        for optimizer in (made, other):
            saved = copy.deepcopy(optimizer.state_dict())
            for entry in saved["state"].values():
                entry["momentum_buffer"] = torch.ones_like(entry["momentum_buffer"])
            optimizer.load_state_dict(saved)
        for run in (step, reference_step):
            torch.manual_seed(6)
            run(*inputs)
    assert step.graphs_made <= 2
    assert largest_difference(plain, model) < 1e-5


def test_a_method_runs_over_the_ranks() -> None:
    model = build("mlp")
    made = OPTIMIZERS["sgd"](model.parameters())

    with simulate(2):

        class Trainer:
            @mf.graph(model, made, placement=Placement.all("cpu"), backend="aten", progress=False)
            def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return training_step(model, made)(x, y)

        plan = Trainer().step.plan(*batch("mlp", 4))
    assert plan.collectives


def dropped(mesh: Any, seed: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """A dropout mask over the ranks of a mesh, and the step that drew it."""
    with simulate(torch.tensor(mesh).numel()):
        graph = mf.graph(placement=Placement("cpu", mesh), backend="aten", progress=False, **options)
        step = graph(lambda x: torch.nn.functional.dropout(x, 0.5))
        torch.manual_seed(seed)
        return step(torch.ones(8, 50)), step


def test_fast_random_values_are_drawn_piece_by_piece() -> None:
    torch.manual_seed(1)
    exact = torch.nn.functional.dropout(torch.ones(8, 50), 0.5)
    assert torch.equal(dropped([0, 1], 1)[0], exact)
    fast, step = dropped([0, 1], 1, random="fast")
    assert not torch.equal(fast, exact) and 0.4 < float((fast == 0).float().mean()) < 0.6
    assert not torch.equal(fast[:4], fast[4:]), "each piece has a stream of its own"
    assert torch.equal(fast, dropped([[0, 1], [2, 3]], 1, random="fast")[0]), "ranks that hold the same piece draw the same"
    assert torch.equal(fast, dropped([0, 1], 1, random="fast")[0]) and not torch.equal(fast, dropped([0, 1], 2, random="fast")[0])
    with simulate(2):
        local = step._parallel.local_graph(step.laid_out(torch.ones(8, 50)), (0,))
    assert max(n.meta["val"].numel() for n in local.nodes if isinstance(n.meta.get("val"), torch.Tensor)) == 200


def test_graphs_print_lines_and_layouts() -> None:
    model = build("mlp")
    made = OPTIMIZERS["sgd"](model.parameters())
    with simulate(2):
        step = mf.graph(model, made, placement=Placement.all("cpu"), progress=False)(training_step(model, made))
        whole = step.graph_for(*batch("mlp", 4)).print_readable(print_output=False)
        own = step.rank_graph_for(*batch("mlp", 4)).print_readable(print_output=False)
    assert "small_models.py:" in whole and "f32[4, 16] S(0)" in whole and "f32[5, 16] P" in whole
    assert "small_models.py:" in own and "f32[2, 16] S(0)" in own and "_c10d_functional.all_reduce" in own


def test_the_class_form_runs_over_ranks() -> None:
    model = build("mlp")
    inputs = batch("mlp", 6)
    losses, expected = reference(model, "sgd", inputs, 2)

    class Train(mf.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)
            self.add_optimizer(OPTIMIZERS["sgd"](self.model.parameters()))
            self.config.placement = Placement("cpu", [[0, 1]])
            self.config.layout = {"fc1.*": ["B", "S(0)"]}
            self.config.backend = "aten"

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = self.model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

    with simulate(2):
        train = Train()
        torch.manual_seed(5)
        assert [float(train(*inputs)) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    for got, wanted in zip(train.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_every_op_of_a_rank_knows_its_line(name: str) -> None:
    model = build(name)
    made = OPTIMIZERS["adamw"](model.parameters())
    layout = TENSOR_PARALLEL.get(name, {})
    with simulate(4):
        placement = Placement("cpu", [[0, 1], [2, 3]])
        step = mf.graph(model, made, placement=placement, layout=layout, progress=False)(training_step(model, made))
        graph = step.rank_graph_for(*batch(name, 8)).graph
    calls = [n for n in graph.nodes if n.op == "call_function"]
    assert [n for n in calls if "op" not in n.meta or n.meta["op"].user is None] == []
