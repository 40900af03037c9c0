"""Training steps on real gloo processes: the numbers of one device, and errors that every rank sees."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monoflow as mf
from benchmarks.small_models import TENSOR_PARALLEL, batch
from monoflow.placement import Placement
from tests.parallel_models import OPTIMIZERS, build, largest_difference, reference, training_step
from tests.processes import run_on


def _step(name: str, mesh: Any, layout: Any, optimizer: str, backend: str = "aten", **options: Any) -> tuple[Any, Any, Placement]:
    model = build(name)
    made = OPTIMIZERS[optimizer](model.parameters())
    placement = Placement("cpu", mesh)
    graph = mf.graph(model, made, placement=placement, layout=layout, backend=backend, progress=False, **options)
    return graph(training_step(model, made)), model, placement


def _rank() -> int:
    return torch.distributed.get_rank()


def train(name: str, mesh: Any, layout: Any, optimizer: str, backend: str, size: int = 12) -> tuple[float, float, list[float]]:
    step, model, placement = _step(name, mesh, layout, optimizer, backend)
    inputs = batch(name, size)
    losses, expected = reference(build(name), optimizer, inputs, 3)
    data = placement.shape[0]
    at = (placement.coordinate(_rank()) or (0,))[0]
    pieces = [t.chunk(data)[at] for t in inputs]
    torch.manual_seed(5 if _rank() == 0 else 17)  # the first rank's generator counts
    got = [float(step(*pieces)) for _ in range(3)]
    return max(abs(a - b) / abs(a) for a, b in zip(losses, got, strict=True)), largest_difference(expected, model), got


@pytest.mark.parametrize(
    ("name", "mesh", "tensor_parallel", "optimizer", "backend"),
    [
        ("gpt", [0, 1], False, "adamw-fused", "inductor"),
        ("convnet", [0, 1], False, "sgd", "aten"),
        ("gpt", [[0, 1], [2, 3]], True, "adamw", "aten"),
        ("mlp", [[0, 1]], True, "adamw-fused", "aten"),
    ],
    ids=str,
)
def test_equals_one_device(name: str, mesh: Any, tensor_parallel: bool, optimizer: str, backend: str) -> None:
    results = run_on(
        torch.tensor(mesh).numel(),
        "tests.test_processes:train",
        name,
        mesh,
        TENSOR_PARALLEL[name] if tensor_parallel else {},
        optimizer,
        backend,
    )
    assert len({tuple(losses) for _, _, losses in results}) == 1, "the loss is the same on every rank"
    assert all(loss < 1e-5 and model < 1e-5 for loss, model, _ in results)


def parameters_differ(sync: str) -> list[float]:
    step, model, _ = _step("mlp", [0, 1], {}, "sgd", sync=sync)
    if _rank() == 1:
        with torch.no_grad():
            model.fc1.weight += 1
    step(*batch("mlp", 4))
    return model.fc1.weight.flatten()[:3].tolist()


def test_parameters_of_the_first_rank_are_taken() -> None:
    first, second = run_on(2, "tests.test_processes:parameters_differ", "rank0")
    assert first == second


def short_batches(sizes: list[tuple[int, int]]) -> tuple[float, float, int]:
    """Every step with other pieces on the two ranks, beside plain PyTorch on the whole batch."""
    step, model, _ = _step("mlp", [0, 1], {}, "sgd")
    plain = build("mlp")
    plain_step = training_step(plain, OPTIMIZERS["sgd"](plain.parameters()))
    worst = 0.0
    for seed, both in enumerate(sizes):
        whole = batch("mlp", sum(both))
        start = sum(both[: _rank()])
        piece = [t[start : start + both[_rank()]] for t in whole]
        torch.manual_seed(seed)
        got = float(step(*piece))
        torch.manual_seed(seed)
        wanted = float(plain_step(*whole).detach())
        worst = max(worst, abs(got - wanted) / abs(wanted))
    return worst, largest_difference(plain, model), step.graphs_made


def test_a_short_batch_on_one_rank_at_a_later_step() -> None:
    for loss, model, graphs in run_on(2, "tests.test_processes:short_batches", [(4, 4), (4, 4), (4, 1), (4, 4), (1, 4), (4, 0)]):
        assert loss < 1e-5 and model < 1e-5
        assert graphs == 3


def walk_over_a_set() -> tuple[float, int]:
    """Each process walks over the names in an order of its own; the ops are the same."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcdefgh"})
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    @mf.graph(layers, optimizer, placement=mf.placement.all("cpu"), backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        found = {name: layers[name](x) for name in {*"abcdefgh"}}
        loss = torch.stack([found[name] for name in "abcdefgh"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return float(step(torch.ones(2, 4))), hash("a")


def test_ranks_that_walk_in_other_orders_take_that_of_the_first() -> None:
    (first, one), (second, other) = run_on(2, "tests.test_processes:walk_over_a_set")
    assert one != other, "each process hashes text in a way of its own"
    assert first == second


def fast_random(backend: str) -> list[float]:
    step, _, _ = _step("mlp", [0, 1], {}, "sgd", backend, random="fast")
    torch.manual_seed(3)
    return [float(step(*(t.chunk(2)[_rank()] for t in batch("mlp", 8)))) for _ in range(3)]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_fast_random_values_on_processes(backend: str) -> None:
    one, other = run_on(2, "tests.test_processes:fast_random", backend)
    assert one == other and len(set(one)) == 3


def complex_numbers(dtype: torch.dtype) -> list[bool]:
    """A reduction and a gathering of complex numbers."""
    whole = torch.complex(*torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=dtype.to_real()))
    step = mf.graph(placement=mf.placement.all("cpu"), backend="aten", progress=False)(
        lambda x: (x.sum(0), mf.to_global(x, sbp="B") * 2, mf.to_global(mf.to_global(x.sum(0), sbp="P"), sbp="S(0)"))
    )
    total, doubled, cut = step(whole.chunk(2)[_rank()])
    found = [(total, whole.sum(0)), (doubled, 2 * whole), (cut.full_tensor(), whole.sum(0))]
    return [torch.allclose(a, b) for a, b in found]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_travel(dtype: torch.dtype) -> None:
    assert run_on(2, "tests.test_processes:complex_numbers", dtype) == [[True] * 3] * 2


class _Counted(TorchDispatchMode):
    """Bytes that a rank sends in the collectives that really run, by the formula of the bandwidth-optimal algorithms."""

    UNITS: ClassVar = {"all_reduce": 2, "all_reduce_": 2, "all_to_all_single": 1, "reduce_scatter_tensor": 1}

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and name.split("::")[1] in self.UNITS:
            self.sizes.append((self.UNITS[name.split("::")[1]], args[0].numel() * args[0].element_size()))
        return func(*args, **(kwargs or {}))


def count_bytes(ranks: int) -> tuple[float, float, int]:
    """(bytes sent for gradients, for scalars; bytes of the parameters) of a data parallel step."""
    step, model, _ = _step("mlp", list(range(ranks)), {}, "adamw-fused")
    pieces = [t.chunk(ranks)[_rank()] for t in batch("mlp", 2 * ranks)]
    step(*pieces)
    with _Counted() as counted:
        step(*pieces)
    share = (ranks - 1) / ranks
    large, small = ([u * size * share for u, size in counted.sizes if (size > 8) is is_large] for is_large in (True, False))
    return sum(large), sum(small), sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_send_twice_the_parameters(ranks: int) -> None:
    for gradients, scalars, parameters in run_on(ranks, "tests.test_processes:count_bytes", ranks):
        assert gradients == 2 * (ranks - 1) / ranks * parameters
        assert 0 < scalars < 100
