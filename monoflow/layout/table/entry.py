"""What a table of rules holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from monoflow.layout.call import Call

Entry: TypeAlias = str | Callable[[Call], str | None]
"""A line, or a function that makes the line of a call; None from it means that this call has no rule."""


def same(line: Entry, names: str) -> dict[str, Entry]:
    """One entry for several ops, named with spaces between."""
    return dict.fromkeys(names.split(), line)
