"""Ops on lists of tensors: each index by itself."""

from __future__ import annotations

from typing import Any

import torch

from monoflow.layout.call import Call, term
from monoflow.layout.table.entry import Entry
from monoflow.schema import tensor_arguments


def each(call: Call) -> str:
    names = tensor_arguments(call.target)
    inputs = ["[...]" if isinstance(call[n], list | tuple) else _single(call[n]) for n in names]
    return f"{', '.join(inputs)} -> {', '.join(['[...]'] * len(call.results))}"


def _single(value: Any) -> str:
    """An argument that all indices share: whole."""
    return term(["1"] * value.dim()) if isinstance(value, torch.Tensor) else "."


RULES: dict[str, Entry] = {
    "_foreach_norm": "[...!] -> [.]",
    "_foreach_max": "[...!] -> [.]",
}
