"""Every pair of layouts: pieces are made, boxed by the ranks' graphs, put together again, and compared with the whole."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from monoflow._torch import FakeTensorMode
from monoflow.cutting import coordinates
from monoflow.lower.boxing import convert
from monoflow.lower.emit import Emitter
from monoflow.run.simulated import run_lockstep
from monoflow.sbp import Broadcast, Layout, Split, format_layout, parse, piece_of

SBPS = [parse(s) for s in ("B", "S(0)", "S(1)", "S(2)", "P", "P(max)", "P(min)", "P(mean)", "P(prod)")]


REDUCE: dict[str, Any] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "prod": torch.prod,
    "any": torch.any,
    "all": torch.all,
}


def make_pieces(whole: torch.Tensor, found: Layout, mesh_shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Each rank's piece of a value in a layout, with drawn terms."""
    pieces = [whole]
    for sbp, parts in zip(found, mesh_shape, strict=True):
        pieces = [piece for held in pieces for piece in _divide(held, sbp, parts)]
    return pieces


def _divide(held: torch.Tensor, sbp: Any, parts: int) -> list[torch.Tensor]:
    if isinstance(sbp, Split):
        bounds = [piece_of(held.shape, (sbp,), (parts,), (i,)) for i in range(parts)]
        return [held.narrow(sbp.dim, at[sbp.dim], sizes[sbp.dim]).clone() for at, sizes in bounds]
    if isinstance(sbp, Broadcast):
        return [held.clone() for _ in range(parts)]
    kept = torch.randint(parts, held.shape)
    noise = [torch.randint(1, 4, held.shape).to(held.dtype) for _ in range(parts)]
    if sbp.reduction in ("sum", "mean"):
        last = held * (parts if sbp.reduction == "mean" else 1) - sum(noise[1:])
        return [last, *noise[1:]]
    if sbp.reduction == "prod":
        return [held / math.prod(noise[1:]), *noise[1:]] if parts > 1 else [held]
    sign = -1 if sbp.reduction == "max" else 1
    return [torch.where(kept == i, held, held + sign * noise[i]) for i in range(parts)]


def put_together(pieces: list[torch.Tensor], found: Layout, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The whole; copies are compared on the way."""
    for dim in reversed(range(len(mesh_shape))):
        parts = mesh_shape[dim]
        pieces = [_combine(pieces[i : i + parts], found[dim]) for i in range(0, len(pieces), parts)]
    return pieces[0]


def _combine(pieces: list[torch.Tensor], sbp: Any) -> torch.Tensor:
    if isinstance(sbp, Split):
        return torch.cat(pieces, sbp.dim)
    if isinstance(sbp, Broadcast):
        assert all(torch.equal(p, pieces[0]) for p in pieces)
        return pieces[0]
    return REDUCE[sbp.reduction](torch.stack(pieces), 0)


def boxing_graphs(
    pieces: list[torch.Tensor], src: Layout, dst: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> list[fx.Graph]:
    mode, graphs = FakeTensorMode(), []
    for piece, coordinate in zip(pieces, coordinates(mesh_shape), strict=True):
        graph = fx.Graph()
        value = graph.placeholder("x")
        value.meta["val"] = mode.from_tensor(piece)
        emit = Emitter(graph, mode)
        result = convert(emit, value, src, dst, shape, mesh_shape, coordinate)
        assert list(result.meta["val"].shape) == piece_of(shape, dst, mesh_shape, coordinate)[1]
        graph.output((result,))
        graphs.append(graph)
    return graphs


def check(src: Layout, dst: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
    whole = torch.randint(-8, 9, shape).to(dtype)
    pieces = make_pieces(whole, src, mesh_shape)
    graphs = boxing_graphs(pieces, src, dst, shape, mesh_shape)
    results = [outputs[0] for outputs in run_lockstep(graphs, [[p] for p in pieces], mesh_shape)]
    found = put_together(results, dst, mesh_shape, shape)
    message = f"{format_layout(src)} -> {format_layout(dst)} of {shape} on {mesh_shape}"
    assert found.dtype == dtype, message
    torch.testing.assert_close(found, whole, msg=lambda text: f"{message}\n{text}")


@pytest.mark.parametrize("mesh_shape", [(2,), (3,)])
@pytest.mark.parametrize("shape", [(6, 12, 6), (5, 7, 1), (1, 5, 0), (0, 1, 7)], ids=str)
def test_every_pair_on_a_line(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for src, dst in itertools.product(SBPS, repeat=2):
        check((src,), (dst,), shape, mesh_shape)


MESH_LAYOUTS = list(itertools.product(SBPS, repeat=2))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("shape", [(12, 24, 12), (5, 7, 1)], ids=str)
def test_drawn_pairs_on_a_mesh(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for src, dst in random.Random(f"{mesh_shape} {shape}").sample(list(itertools.product(MESH_LAYOUTS, repeat=2)), 60):
        check(src, dst, shape, mesh_shape)


def _box_on_gloo(
    rank: int, mesh_shape: tuple[int, ...], store: str, cases: list[tuple[Layout, Layout, tuple[int, ...], torch.dtype]]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(mesh_shape))
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
    names = {f"mesh{dim}": mesh.get_group(dim).group_name for dim in range(len(mesh_shape))}
    for src, dst, shape, dtype in cases:
        torch.manual_seed(0)
        pieces = make_pieces(torch.randint(0, 2, shape).to(dtype), src, mesh_shape)
        graphs = boxing_graphs(pieces, src, dst, shape, mesh_shape)
        expected = run_lockstep(graphs, [[p] for p in pieces], mesh_shape)[rank][0]
        for node in graphs[rank].nodes:
            node.args = tuple(names.get(a, a) if isinstance(a, str) else a for a in node.args)
        found = fx.Interpreter(fx.GraphModule({}, graphs[rank])).run(pieces[rank])[0]
        message = f"rank {rank}: {format_layout(src)} -> {format_layout(dst)} of {shape}, {dtype}"
        torch.testing.assert_close(found, expected, msg=message)
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_gloo_does_what_simulated_ranks_do(mesh_shape: tuple[int, ...], tmp_path: Path) -> None:
    draw = random.Random(0)
    shapes = [(6, 12, 6), (5, 7, 1), (1, 5, 0), (0, 1, 7)]
    layouts = list(itertools.product(SBPS, repeat=len(mesh_shape)))
    cases = [(*draw.choices(layouts, k=2), draw.choice(shapes), draw.choice([torch.float64, torch.float32])) for _ in range(16)]
    plain = [s for s in SBPS if str(s) in ("B", "S(0)", "S(1)")]
    moved = [pair for pair in itertools.product(itertools.product(plain, repeat=len(mesh_shape)), repeat=2) if pair[0] != pair[1]]
    for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.complex64):
        cases += [(*draw.choice(moved), (5, 7, 1), dtype) for _ in range(2)]
    terms = [((SBPS[4],) * len(mesh_shape), (target,) * len(mesh_shape)) for target in plain]
    cases += [(*pair, (4, 8), dtype) for pair in terms for dtype in (torch.bfloat16, torch.int64)]
    mp.spawn(_box_on_gloo, (mesh_shape, str(tmp_path / "store"), cases), nprocs=math.prod(mesh_shape))
