"""The plan of a step over ranks: where its tensors lie and what is communicated, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table

from monoflow.explain.memory import Memory


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the state: its whole shape, its layout, and the bytes that one rank holds of it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    layout: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of a step: along which mesh dimension, over how many ranks, bytes of the tensor and bytes sent by one rank."""

    kind: str
    mesh_dim: str
    ranks: int
    dtype: str
    size: int
    sent: int
    phase: str
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of a step does on a rank. Sizes are in bytes, for the first rank of the placement.

    state, collectives   what a rank holds, and what it communicates
    memory               what it takes, predicted from the graph as the step's backend runs it
    measured             the peak in bytes that `Step.measure` has counted on this rank; None where the step has not been run for it
    """

    step: str
    placement: str
    state: tuple[PlannedTensor, ...]
    collectives: tuple[PlannedCollective, ...]
    memory: Memory = field(default_factory=Memory)
    measured: int | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in one step."""
        return sum(c.sent for c in self.collectives)

    def to_json(self) -> str:
        """The plan as JSON; `Plan.from_json` reads it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`."""
        found = json.loads(text)
        state = tuple(PlannedTensor(**{**t, "shape": tuple(t["shape"])}) for t in found["state"])
        collectives = tuple(PlannedCollective(**c) for c in found["collectives"])
        return cls(found["step"], found["placement"], state, collectives, Memory(**found["memory"]), found["measured"])

    def tables(self) -> Iterable[Table]:
        """Tables of what is communicated, of where the state lies, and of memory."""
        yield self._collective_table()
        yield self._state_table()
        yield self._memory_table()

    def _collective_table(self) -> Table:
        table = Table(title=f"{self.step} on {self.placement}: communication in a step", title_justify="left")
        for name in ("collective", "mesh", "ranks", "phase", "dtype", "calls", "tensor bytes", "bytes sent by a rank"):
            table.add_column(name, justify="left" if name in ("collective", "mesh", "phase", "dtype") else "right")
        calls: Counter[tuple[Any, ...]] = Counter()
        sizes: Counter[tuple[Any, ...]] = Counter()
        sent: Counter[tuple[Any, ...]] = Counter()
        for c in self.collectives:
            key = (c.kind, c.mesh_dim, c.ranks, c.phase, c.dtype)
            calls[key] += 1
            sizes[key] += c.size
            sent[key] += c.sent
        for key, count in calls.items():
            kind, dim, ranks, phase, dtype = key
            table.add_row(kind, dim, str(ranks), phase, dtype, str(count), f"{sizes[key]:,}", f"{sent[key]:,}")
        table.add_section()
        table.add_row("all", "", "", "", "", str(len(self.collectives)), f"{sum(sizes.values()):,}", f"{self.bytes_sent:,}")
        return table

    def _state_table(self) -> Table:
        table = Table(title="state held by a rank", title_justify="left")
        for name in ("kind", "layout", "tensors", "bytes"):
            table.add_column(name, justify="right" if name in ("tensors", "bytes") else "left")
        count: Counter[tuple[str, str]] = Counter()
        held: Counter[tuple[str, str]] = Counter()
        for tensor in self.state:
            count[tensor.kind, tensor.layout] += 1
            held[tensor.kind, tensor.layout] += tensor.bytes
        for (kind, found), number in count.items():
            table.add_row(kind, found, str(number), f"{held[kind, found]:,}")
        return table

    def _memory_table(self) -> Table:
        memory = self.memory
        where = " ".join(filter(None, (memory.op.split("(")[0], memory.line)))
        table = Table(title=f"memory of a rank; its peak comes with {where}" if where else "memory of a rank", title_justify="left")
        table.add_column("bytes of")
        table.add_column("between steps", justify="right")
        table.add_column("at the peak", justify="right")
        for name in ("parameters", "buffers", "state", "gradients", "arguments"):
            value = f"{getattr(memory, name):,}"
            table.add_row(name, "" if name == "arguments" else value, "" if name == "gradients" else value)
        for name in ("activations", "communication", "update"):
            table.add_row(name, "", f"{getattr(memory, name):,}")
        table.add_section()
        table.add_row("all", f"{memory.between_steps + memory.buffers:,}", f"{memory.peak:,}")
        if self.measured is not None:
            table.add_row("measured", "", f"{self.measured:,}")
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Table]:
        """What rich prints."""
        return self.tables()

    def __str__(self) -> str:
        console = Console(width=140)
        with console.capture() as captured:
            for table in self.tables():
                console.print(table)
        return captured.get()
