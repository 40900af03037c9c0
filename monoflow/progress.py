"""The line on the terminal while a graph is made: which room it is in, and how far."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Report = Callable[[str, int, int], None]
"""Told how far a room is: (what, done, of how many; 0 where that is not known)."""


def no_report(what: str, done: int, total: int) -> None:
    """A `Report` for nobody."""


_INTERVAL = 0.1
"""Seconds between updates; counting an op must cost nothing."""


class Progress:
    """Shown on stderr if that is a terminal, else silent."""

    def __init__(self, name: str, shown: bool) -> None:
        console = Console(stderr=True)
        self._bars: Bars | None = None
        self._name = name
        self._room = ""
        self._updated = 0.0
        if shown and console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
            self._bars = Bars(*columns, console=console, transient=True)
            self._task = self._bars.add_task(name, total=None)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def room(self, name: str) -> None:
        self._room = name
        self._updated = 0.0
        self.count("", 0, 0)

    def count(self, what: str, done: int, total: int) -> None:
        """`done` of `total` (0: unknown) of `what`."""
        if self._bars is None or time.monotonic() - self._updated < _INTERVAL:
            return
        self._updated = time.monotonic()
        far = f" {what} {done}" + (f"/{total}" if total else "") if what else ""
        self._bars.update(self._task, description=f"{self._name}: {self._room}{far}", completed=done, total=total or None)
