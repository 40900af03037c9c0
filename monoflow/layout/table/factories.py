"""Ops that make tensors of nothing but sizes."""

from __future__ import annotations

from monoflow.layout.table.entry import Entry, same

RULES: dict[str, Entry] = {
    **same("-> ...", "zeros ones full empty.memory_format empty_strided"),
    **same("-> ...!", "arange linspace logspace eye scalar_tensor randperm"),
    **same(
        "... -> ...",
        "zeros_like ones_like full_like empty_like bernoulli.p rand_like randn_like normal_functional uniform exponential randint_like",
    ),
    **same("-> ...", "rand randn randint normal.float_float"),
    **same("...! -> ...", "new_zeros new_ones new_full new_empty new_empty_strided"),
    **same("... -> ...", "_to_copy"),
    "fill.Scalar": "... -> ...",
    "fill.Tensor": "..., . -> ...",
    "copy": "..., ... -> ...; linear 1",
    "zero": "... -> ...; linear 0",
    "bernoulli.default": "...! -> ...!",
}
