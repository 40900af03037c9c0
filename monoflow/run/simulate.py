"""A laid-out step on ranks that are all in this process: state and arguments are whole, each rank gets its pieces for a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monoflow.cutting import assemble, coordinates, cut
from monoflow.layout.lay_out import LaidOut
from monoflow.lower.rank_graph import rank_graph
from monoflow.rng import Random
from monoflow.run.simulated import run_lockstep
from monoflow.sbp import Layout

_copy = torch.ops.aten.copy_.default


class Simulated:
    """An executable over whole values: cuts them, runs every rank's local graph in lockstep, and puts the results together."""

    def __init__(self, laid: LaidOut, random: Random = "exact") -> None:
        self._random: Random = random
        self._mesh_shape = laid.placement.shape
        self._laid = laid
        graph = laid.graph
        self._local: list[fx.Graph] = []
        self._inputs, self._outputs = laid.inputs, laid.outputs
        places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        written = (n.args[0] for n in graph.find_nodes(op="call_function", target=_copy))
        self._written = sorted({places[n] for n in written if n in places})

    def _graphs(self) -> list[fx.Graph]:
        """Every rank's graph, made for the first run: a plan for a thousand ranks needs only one of them."""
        if not self._local:
            self._local = [rank_graph(self._laid, at, self._random) for at in coordinates(self._mesh_shape)]
        return self._local

    def __call__(self, values: list[Any]) -> list[Any]:
        ranks = [[self._piece(v, found, at) for v, found in zip(values, self._inputs, strict=True)] for at in coordinates(self._mesh_shape)]
        results = run_lockstep(self._graphs(), [list(r) for r in ranks], self._mesh_shape)
        for place in self._written:
            found = self._inputs[place]
            assert found is not None
            values[place].copy_(assemble([rank[place] for rank in ranks], found, self._mesh_shape))
        outputs = [self._whole([r[i] for r in results], found) for i, found in enumerate(self._outputs)]
        values.clear()
        return outputs

    def _piece(self, value: Any, found: Layout | None, at: tuple[int, ...]) -> Any:
        return value if found is None else cut(value, found, self._mesh_shape, at)

    def _whole(self, pieces: list[Any], found: Layout | None) -> Any:
        return pieces[0] if found is None else assemble(pieces, found, self._mesh_shape)
