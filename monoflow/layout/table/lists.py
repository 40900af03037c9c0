"""Ops on lists of tensors: each index by itself."""

from __future__ import annotations

from monoflow.layout.call import Call, tensor_arguments
from monoflow.layout.table.entry import Entry


def each(call: Call) -> str:
    names = tensor_arguments(call.target)
    inputs = ["[...]" if isinstance(call[n], list | tuple) else "...!" for n in names]
    return f"{', '.join(inputs)} -> {', '.join(['[...]'] * len(call.results))}"


RULES: dict[str, Entry] = {
    "_foreach_norm": "[...!] -> [.]",
    "_foreach_max": "[...!] -> [.]",
}
