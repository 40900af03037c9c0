"""Elementwise ops: every dimension may be cut. PyTorch tags them; here stands which arguments may hold partial sums."""

from __future__ import annotations

import torch

from monoflow.layout.call import Call
from monoflow.layout.table.entry import Entry, same
from monoflow.schema import tensor_arguments


def pointwise(call: Call) -> str | None:
    """Any op whose result at a position depends on the arguments at that position only."""
    return line_of(call)


def line_of(call: Call, linear: str = "") -> str:
    """`..., ... -> ...` with as many terms as the op has tensors."""
    inputs = ", ".join(["..."] * len(tensor_arguments(call.target)))
    outputs = ", ".join(["..."] * len(call.results))
    return f"{inputs} -> {outputs}" + (f"; linear {linear}" if linear else "")


def _both_tensors(linear: str) -> Entry:
    """Linear in the arguments of that number where all of them are tensors: a plain number would be added once for each rank."""

    def entry(call: Call) -> str:
        tensors = [call[name] for name in tensor_arguments(call.target)]
        return line_of(call, linear if all(isinstance(t, torch.Tensor) for t in tensors) else "")

    return entry


def _backward(call: Call) -> str:
    return line_of(call, "0")


RULES: dict[str, Entry] = {
    **same("... -> ...; linear 0", "neg"),
    **same("... -> ...; linear 0", "mul.Scalar div.Scalar"),
    "mul.Tensor": "..., ... -> ...; linear 0 | 1",
    "div.Tensor": "..., ... -> ...; linear 0",
    **same(_both_tensors("0 1"), "complex add.Tensor sub.Tensor lerp.Scalar"),
    **same("..., ..., ... -> ...; linear 1 2", "where.self"),
    **same("..., ... -> ...", "masked_fill.Scalar polar"),
    **same(
        _backward,
        "gelu_backward silu_backward hardshrink_backward softshrink_backward threshold_backward tanh_backward sigmoid_backward "
        "softplus_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward "
        "mish_backward log_sigmoid_backward native_dropout_backward",
    ),
}
