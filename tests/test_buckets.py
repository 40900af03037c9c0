"""All-reduces of a rank's graph, joined in buckets."""

from __future__ import annotations

import torch
from torch import fx

from monoflow._torch import FakeTensorMode
from monoflow.capture.graph import is_collective
from monoflow.compile import prepared_graph
from monoflow.layout.cost import DEFAULTS
from monoflow.layout.lay_out import Schedule
from monoflow.lower.emit import Emitter
from monoflow.lower.schedule import order_communication
from monoflow.run.simulated import run_lockstep
from monoflow.source import Frame, OpInfo

functional = torch.ops._c10d_functional


def reductions() -> fx.Graph:
    """Two all-reduces in a row, the last one waited for at once; then one that depends on them."""
    emit = Emitter(fx.Graph(), FakeTensorMode())
    graph = emit.graph
    inputs = []
    for name in ("x", "y"):
        inputs.append(graph.placeholder(name))
        with emit.mode:
            inputs[-1].meta["val"] = torch.empty(2, 3)
    values = [emit.call(torch.ops.aten.mul.Scalar, x, 2.0) for x in inputs]
    sums = [emit.call(functional.all_reduce.default, v, "sum", "mesh0") for v in values]
    waits = [emit.call(functional.wait_tensor.default, s) for s in sums]
    both = emit.call(torch.ops.aten.add.Tensor, *waits)
    last = emit.call(functional.wait_tensor.default, emit.call(functional.all_reduce.default, both, "sum", "mesh0"))
    graph.output((waits[0], waits[1], last))
    return graph


def test_buckets_keep_the_results_and_the_order_of_nodes() -> None:
    torch.manual_seed(0)
    pieces = [[torch.randn(2, 3), torch.randn(2, 3)] for _ in range(2)]
    wanted = run_lockstep([reductions(), reductions()], pieces, (2,))
    graphs = [reductions(), reductions()]
    for graph in graphs:
        order_communication(graph, DEFAULTS["cpu"].link, Schedule())
        assert list(reversed(list(reversed(graph.nodes)))) == list(graph.nodes)
        joined = [n for n in graph.nodes if "all_reduce" in str(n.target)]
        assert len(joined) == 2
        graph.lint()
    for got, expected in zip(run_lockstep(graphs, pieces, (2,)), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_backends_keep_the_order_of_collectives() -> None:
    """Pieces are not of one size on all ranks: what depends on sizes must not move collectives."""
    frame = Frame("train.py", 1, "train", "optimizer.step()", False)
    emit = Emitter(fx.Graph(), FakeTensorMode())
    emit.info = OpInfo((frame,), "", "update")
    x = emit.graph.placeholder("x")
    with emit.mode:
        x.meta["val"] = torch.empty(4)
    started = [
        emit.call(functional.all_reduce.default, emit.call(torch.ops.aten.mul.Tensor, x, x), "sum", "mesh0"),
        emit.call(functional.all_gather_into_tensor.default, x, 2, "mesh0"),
    ]
    emit.graph.output(tuple(emit.call(functional.wait_tensor.default, s) for s in started))
    wanted = [n.target for n in emit.graph.nodes if is_collective(n.target)]
    for backend in ("aten", "inductor"):
        assert [n.target for n in prepared_graph(emit.graph, backend).nodes if is_collective(n.target)] == wanted
