"""Functions under drawn shapes, values, layouts and meshes: pieces give what the whole gives, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from monoflow.sbp import Layout, Partial, Split, broadcast
from monoflow.testing.execution import check, make_case

MESHES = [(2,), (3,), (2, 2), (1, 3)]


@dataclass(frozen=True)
class Function:
    """A function, and the shapes of its arguments for sizes (a, b, c)."""

    call: Callable[..., Any]
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]


def _one(call: Callable[[Tensor], Any]) -> Function:
    return Function(call, lambda a, b, c: [(a, b, c)])


FUNCTIONS = {
    "matmul": Function(lambda x, y: x @ y, lambda a, b, c: [(a, b, c), (c, b)]),
    "broadcast": Function(lambda x, y, z: x * y + z, lambda a, b, c: [(a, b, c), (b, 1), (1, 1, c)]),
    "linear": Function(lambda x, w, v: F.gelu(F.linear(x, w, v)), lambda a, b, c: [(a, b, c), (a + 1, c), (a + 1,)]),
    "layer_norm": Function(lambda x, w, v: F.layer_norm(x, (x.shape[-1],), w, v), lambda a, b, c: [(a, b, c), (c,), (c,)]),
    "batch_norm": Function(lambda x: F.batch_norm(x, None, None, training=True), lambda a, b, c: [(a + 1, b, c + 1)]),
    "attention": Function(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), lambda a, b, c: [(a, b, c, 4), (a, b, b + 1, 4), (a, b, b + 1, 4)]
    ),
    "softmax": _one(lambda x: F.softmax(x, 1) + F.log_softmax(x, -1)),
    "reductions": _one(lambda x: (x.sum(1), x.mean((0, 2)), x.amax(-1), x.std(0), x.logsumexp(1))),
    "views": _one(lambda x: x.flatten(0, 1).t().reshape(x.shape[2], x.shape[0], -1).permute(1, 2, 0).unsqueeze(1).squeeze(1)),
    "pieces": _one(lambda x: torch.cat([x[:, :1], x.flip(1), *x.split(1, 0)[:1]] if x.shape[0] == 1 else [x[:, :1], x.flip(1)], 1)),
    "in place": _one(lambda x: (x * 1).mul_(2).add_(x).t_() if x.dim() == 2 else (x * 1).mul_(2).add_(x).sub_(1)),
    "sorted": _one(lambda x: (x.sort(1).values, x.cumsum(0), x.topk(1, -1).values)),
    "picked": _one(
        lambda x: (
            x[:, x.shape[1] - 1],
            x.index_select(2, torch.arange(x.shape[2]).flip(0)),
            x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
        )
    ),
    "clipped": _one(lambda x: x * torch.clamp(1 / (torch.linalg.vector_norm(x) + 1e-6), max=1.0)),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[Tensor], tuple[int, ...], list[Layout]]:
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    sizes = [draw(st.integers(1, 7)) for _ in range(3)]
    mesh = draw(st.sampled_from(MESHES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scale = draw(st.sampled_from([0.3, 1.0, 17.0]))
    arguments = [torch.randn(s, generator=generator).mul(scale).requires_grad_() for s in FUNCTIONS[name].shapes(*sizes)]
    layouts = [tuple(draw(st.sampled_from([broadcast, Partial(), *map(Split, range(t.dim()))])) for _ in mesh) for t in arguments]
    return name, arguments, mesh, layouts


@given(cases())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_layouts(drawn: tuple[str, list[Tensor], tuple[int, ...], list[Layout]]) -> None:
    name, arguments, mesh, layouts = drawn
    case = make_case(FUNCTIONS[name].call, arguments)
    outcome = check(case, tuple(layouts), mesh)
    assert not outcome.error, f"{name} of {[tuple(a.shape) for a in arguments]}: {outcome}"
    assert not outcome.fallbacks
