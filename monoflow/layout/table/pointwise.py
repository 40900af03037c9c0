"""Elementwise ops: every dimension may be cut. PyTorch tags them; here stands which arguments may hold partial sums."""

from __future__ import annotations

from monoflow.layout.call import Call
from monoflow.layout.table.entry import Entry, same


def pointwise(call: Call) -> str | None:
    """Any op whose result at a position depends on the arguments at that position only."""
    return _line(call)


def _line(call: Call, linear: str = "") -> str:
    from monoflow.layout.call import tensor_arguments

    inputs = ", ".join(["..."] * len(tensor_arguments(call.target)))
    outputs = ", ".join(["..."] * len(call.results))
    return f"{inputs} -> {outputs}" + (f"; linear {linear}" if linear else "")


RULES: dict[str, Entry] = {
    **same("... -> ...; linear 0", "neg clone"),
    "mul.Tensor": "..., ... -> ...; linear 0 | 1",
}
