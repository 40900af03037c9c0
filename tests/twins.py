"""Runs one step as plain PyTorch and as a graph, from identical copies, and compares all that they leave behind, to the bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import monoflow as mf


@dataclasses.dataclass
class Setup:
    """A step and the modules and optimizers it uses; `after(i)` is called after step number i (schedulers)."""

    step: Callable[..., Any]
    state: tuple[nn.Module | Optimizer, ...]
    after: Callable[[int], None] = lambda i: None

    def graph(self) -> mf.Step[..., Any]:
        return mf.graph(*self.state, backend="aten", progress=False)(self.step)


def compare(
    make: Callable[[], Setup],
    calls: Iterable[tuple[Any, ...] | dict[str, Any]],
    *,
    graphs: int = 1,
    alternate: bool = False,
    seed: int = 0,
) -> tuple[Setup, Setup, mf.Step[..., Any]]:
    """`make` is called twice from the same seed; one copy runs plainly, the other as a graph, with the arguments of `calls` in turn.

    After each call everything must be equal: result, parameters, buffers, gradients (also the arguments'), optimizer state, random state.
    `graphs` is how many graphs may be made; `alternate` runs every other step of the second copy plainly, too.
    """
    plain = _made(make, seed)
    other = _made(make, seed)
    step = other.graph()
    for i, call in enumerate(calls):
        wanted, wanted_args, wanted_random = _call(plain.step, call, seed + i)
        got, args, random = _call(other.step if alternate and i % 2 else step, call, seed + i)
        where = f"step {i}: "
        assert_same(got, wanted, where + "result")
        assert_same(args, wanted_args, where + "arguments")
        assert_same(random, wanted_random, where + "random state")
        assert_same_state(other.state, plain.state, where)
        for setup in (plain, other):
            torch.manual_seed(seed + i)
            setup.after(i)
    assert step.graphs_made == graphs, f"{step.graphs_made} graphs made, {graphs} expected"
    return plain, other, step


def _made(make: Callable[[], Setup], seed: int) -> Setup:
    torch.manual_seed(seed)
    return make()


def _call(step: Callable[..., Any], call: tuple[Any, ...] | dict[str, Any], seed: int) -> tuple[Any, Any, torch.Tensor]:
    call = copied(call)
    torch.manual_seed(seed)
    result = step(**call) if isinstance(call, dict) else step(*call)
    return result, call, torch.get_rng_state()


def copied(value: Any) -> Any:
    """Tensors cloned (leaves stay leaves, gradients dropped), containers rebuilt, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [copied(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{f.name: copied(getattr(value, f.name)) for f in dataclasses.fields(value)})  # type: ignore[type-var]
    return value


def state_of(objects: Iterable[nn.Module | Optimizer]) -> list[Any]:
    """All that a step may change: parameters, gradients, buffers, optimizer state and options."""
    found: list[Any] = []
    for value in objects:
        if isinstance(value, Optimizer):
            found.append(value.state_dict())
        else:
            tensors = {**dict(value.named_parameters(remove_duplicate=False)), **dict(value.named_buffers(remove_duplicate=False))}
            found.append({name: (tensor, tensor.grad) for name, tensor in tensors.items()})
    return found


def assert_same_state(got: Iterable[nn.Module | Optimizer], wanted: Iterable[nn.Module | Optimizer], where: str = "") -> None:
    assert_same(state_of(got), state_of(wanted), where + "state")


def assert_same(got: Any, wanted: Any, where: str = "value") -> None:
    """Equal to the bit, with NaN equal to NaN; containers item by item."""
    if isinstance(wanted, torch.Tensor):
        _assert_same_tensor(got, wanted, where)
    elif isinstance(wanted, Mapping):
        assert type(got) is type(wanted) and list(got) == list(wanted), f"{where}: {got!r} for {wanted!r}"
        for key in wanted:
            assert_same(got[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert type(got) is type(wanted) and len(got) == len(wanted), f"{where}: {got!r} for {wanted!r}"
        for index, pair in enumerate(zip(got, wanted, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif dataclasses.is_dataclass(wanted) or (type(wanted).__eq__ is object.__eq__ and hasattr(wanted, "__dict__") and got is not wanted):
        assert type(got) is type(wanted), where
        assert_same(vars(got), vars(wanted), where)
    else:
        equal = got == wanted or (isinstance(wanted, float) and math.isnan(wanted) and math.isnan(got))
        assert type(got) is type(wanted) and equal, f"{where}: {got!r} for {wanted!r}"


def _assert_same_tensor(got: Any, wanted: torch.Tensor, where: str) -> None:
    assert isinstance(got, torch.Tensor), f"{where}: {type(got).__name__} for a tensor"
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (
        f"{where}: {got.dtype}{tuple(got.shape)} for {wanted.dtype}{tuple(wanted.shape)}"
    )
    if not torch.equal(got, wanted):
        worst = (got.double() - wanted.double()).abs().max().item()
        same = ((got == wanted) | ((got != got) & (wanted != wanted))).all()
        assert same, f"{where}: differs by up to {worst:.3g}"
