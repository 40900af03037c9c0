"""Writes ops into a local graph: each with the metadata of its result and the source of the op it serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monoflow._torch import FakeTensorMode
from monoflow.source import OpInfo


class Emitter:
    """Appends call nodes to `graph`. `info` is the OpInfo that they get; set it before emitting for the next op."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.info: OpInfo | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One op on nodes and plain values; its fake result is computed by running it on the fake arguments."""
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            value = target(*fake_args, **fake_kwargs)
        return self.node(target, args, kwargs, value)

    def node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        """One op whose fake result is known."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if self.info is not None:
            node.meta["op"] = self.info
        return node
