"""What a table of rules holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from monoflow.layout.call import Call
from monoflow.schema import tensor_arguments

Entry: TypeAlias = str | Callable[[Call], str | None]
"""A line, or a function that makes the line of a call; None from it means that this call has no rule."""


def whole(call: Call) -> str:
    """For an op whose results depend on all of its arguments: nothing is cut."""
    inputs = ["[...!]" if isinstance(call[n], list | tuple) else "...!" for n in tensor_arguments(call.target)]
    results = ["[...!]" if isinstance(r, list | tuple) else "...!" for r in call.results]
    return f"{', '.join(inputs)} -> {', '.join(results)}"


def same(line: Entry, names: str) -> dict[str, Entry]:
    """One entry for several ops, named with spaces between."""
    return dict.fromkeys(names.split(), line)
