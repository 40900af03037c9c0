"""From a laid-out step to one rank's graph: what it computes on its pieces, and its communication, in order."""

from __future__ import annotations

from torch import fx

from monoflow.layout.cost import DEFAULTS
from monoflow.layout.lay_out import LaidOut
from monoflow.lower.lower import lower
from monoflow.lower.schedule import order_communication
from monoflow.lower.verify import verify_rank_graph
from monoflow.rng import Random


def rank_graph(laid: LaidOut, coordinate: tuple[int, ...], random: Random = "exact") -> fx.Graph:
    """The graph of the rank at `coordinate` of the placement. It writes into its inputs only at its end."""
    graph = lower(laid.graph, laid.placement.shape, coordinate, random)
    order_communication(graph, DEFAULTS[laid.placement.device_type].link, laid.schedule)
    verify_rank_graph(graph, laid.schedule)
    return graph
