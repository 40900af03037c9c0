"""Checks a function of tensors by execution: on pieces, over every layout of its arguments, against the function on whole tensors.

The function goes the whole way that a step goes: captured together with its gradients, laid out from the layouts of the arguments,
lowered for every rank of a mesh, and run in lockstep.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monoflow.capture import capture
from monoflow.capture.graph import Captured
from monoflow.errors import LayoutWarning
from monoflow.layout.functionalize import functionalize
from monoflow.layout.lay_out import lay_out
from monoflow.layout.pins import Pins
from monoflow.placement import Placement
from monoflow.run.simulate import Simulated
from monoflow.sbp import Layout, Partial, Sbp, Split, broadcast, format_layout
from monoflow.state import State
from monoflow.tree import flatten
from monoflow.world import simulate

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,))


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A captured function, its arguments, and what it gives on whole tensors.

    after       the arguments after the call: it may write into those that need no gradient
    expected    results, then gradients of those arguments that need them
    """

    captured: Captured
    arguments: list[torch.Tensor]
    after: list[torch.Tensor]
    expected: list[torch.Tensor]
    seed: int


@dataclass(slots=True)
class Outcome:
    """What the check of one case on one mesh with one choice of layouts found. `fallbacks` are the ops that had no rule."""

    layouts: tuple[Layout, ...]
    mesh_shape: tuple[int, ...]
    error: str = ""
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = ", ".join(map(format_layout, self.layouts))
        return f"({given}) on {self.mesh_shape}: {self.error or 'right'}"


def make_case(function: Callable[..., Any], arguments: Sequence[torch.Tensor], gradients: bool = True, seed: int = 0) -> Case:
    """Captures `function(*arguments)` with the gradients of a weighted sum of its results. Raises what capture raises."""
    leaves = [a.detach().clone().requires_grad_(a.requires_grad and gradients) for a in arguments]

    def step(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        results = _tensors(function(*_differentiable(tensors)))
        differentiable = [r for r in results if r.requires_grad and r.numel()]
        wanted = [t for t in tensors if t.requires_grad]
        if not differentiable or not wanted:
            return [r.detach() for r in results], []
        loss = sum((_weighted(r) for r in differentiable), torch.zeros(()))
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [r.detach() for r in results], [g for g in found if g is not None]

    torch.manual_seed(seed)
    after = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    expected = _tensors(step(*after))
    flat, _, rebuild = flatten((tuple(leaves), {}))
    captured = capture(step, State(()), flat, rebuild)
    return Case(captured, leaves, [a.detach() for a in after], expected, seed)


def _differentiable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the function is given: not the leaves themselves, which it could not write into."""
    return [t.clone() if t.requires_grad else t for t in tensors]


def _weighted(result: torch.Tensor) -> torch.Tensor:
    """A sum with another weight for each element."""
    real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
    weights = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=real.dtype).reshape(real.shape)
    return (real * weights).sum()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value, objects=True)[0] if isinstance(leaf, torch.Tensor)]


def choices(case: Case, mesh_dims: int = 1, limit: int = 12, seed: int = 0) -> Iterator[tuple[Layout, ...]]:
    """Layouts of the arguments: each cut in each dimension, or partial, with the others whole; all cut alike; and random ones."""
    dims = [a.dim() for a in case.arguments]
    alone: list[tuple[Sbp, ...]] = [
        tuple(sbp if i == j else broadcast for j in range(len(dims))) for i, n in enumerate(dims) for sbp in _possible(n, case.arguments[i])
    ]
    alike = [
        tuple(Split(_clamp(d, n)) if n else broadcast for n in dims)
        for d in [*range(max(dims, default=0)), *range(-max(dims, default=0), 0)]
    ]
    generator = random.Random(seed)
    drawn = [tuple(_draw(generator, n, case.arguments[i]) for i, n in enumerate(dims)) for _ in range(4)]
    every = list(dict.fromkeys([*alike, *alone, *drawn]))
    if len(every) > limit:
        every = every[: limit // 2] + generator.sample(every[limit // 2 :], limit - limit // 2)
    for chosen in every:
        yield tuple((sbp,) + (broadcast,) * (mesh_dims - 1) for sbp in chosen)


def _clamp(dim: int, rank: int) -> int:
    return min(dim, rank - 1) if dim >= 0 else max(rank + dim, 0)


def _possible(rank: int, tensor: torch.Tensor) -> list[Sbp]:
    cut: list[Sbp] = [Split(d) for d in range(rank)]
    return [*cut, Partial()] if tensor.dtype.is_floating_point and tensor.element_size() > 1 else cut


def _draw(generator: random.Random, rank: int, tensor: torch.Tensor) -> Sbp:
    return generator.choice([broadcast, *_possible(rank, tensor)])


def check(case: Case, layouts: tuple[Layout, ...], mesh_shape: tuple[int, ...]) -> Outcome:
    """Runs a case on pieces and compares. Never raises for what the case does; the outcome's `error` says what was wrong."""
    outcome = Outcome(layouts, mesh_shape)
    with simulate(math.prod(mesh_shape)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results, written = run_on_pieces(case, layouts, mesh_shape)
        except Exception as exc:
            outcome.error = f"{type(exc).__name__}: {exc}"
            return outcome
        outcome.fallbacks = tuple(str(w.message) for w in caught if issubclass(w.category, LayoutWarning))
    for index, (got, wanted) in enumerate(zip(results, case.expected, strict=True)):
        error = difference(got, wanted)
        if error:
            outcome.error = f"result {index}: {error}"
            return outcome
    for index, got in written.items():
        error = difference(got, case.after[index])
        if error:
            outcome.error = f"argument {index} after the call: {error}"
    return outcome


def run_on_pieces(
    case: Case, layouts: tuple[Layout, ...], mesh_shape: tuple[int, ...]
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The results of a case whose arguments have the given layouts over simulated ranks; and its arguments, by number, after the call."""
    placement = Placement("cpu", torch.arange(math.prod(mesh_shape)).reshape(mesh_shape).tolist())
    laid = lay_out(functionalize(case.captured), placement, Pins({}, dict(enumerate(layouts))))
    values = [_value(case, source) for source in case.captured.inputs]
    torch.manual_seed(case.seed)
    after = {source.index: v for source, v in zip(case.captured.inputs, values, strict=True) if source.kind == "argument"}
    outputs = Simulated(laid)(values)
    return [v for v in outputs if isinstance(v, torch.Tensor)], after


def _value(case: Case, source: Any) -> Any:
    return source.value if source.kind == "constant" else case.arguments[source.index].detach().clone()


def difference(got: torch.Tensor, wanted: torch.Tensor, relative: float = 2e-4, added: float = 0.0) -> str:
    """What is different, beyond rounding; empty where nothing is. `added` is the size of the terms of which `got` is the sum, if any."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype} {tuple(got.shape)} in place of {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.numel():
        return ""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return "" if torch.equal(got, wanted) else f"{int((got != wanted).sum())} of {wanted.numel()} elements differ"
    if wanted.is_floating_point() and wanted.element_size() == 1:
        got, wanted = got.float(), wanted.float()
    finite = wanted[torch.isfinite(wanted)]
    scale = max(float(finite.abs().max()) if finite.numel() else 1.0, added)
    relative = max(relative, 4 * torch.finfo(wanted.dtype).eps)
    close = torch.isclose(got, wanted, rtol=relative, atol=relative * 0.1 * max(scale, 1.0), equal_nan=True)
    if bool(close.all()):
        return ""
    worst = float((got - wanted).abs().nan_to_num(nan=float("inf")).max())
    return f"{int((~close).sum())} of {wanted.numel()} elements differ, at most by {worst:.3g} (largest value {scale:.3g})"
