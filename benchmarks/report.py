"""What the commands share: a console and the memory of a process."""

from __future__ import annotations

import resource
import sys

from rich.console import Console


def console() -> Console:
    """A console wide enough for the tables also where the output is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=140)


def peak_memory() -> int:
    """The most memory that this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
