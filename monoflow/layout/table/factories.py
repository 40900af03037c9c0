"""Ops that make tensors of nothing but sizes."""

from __future__ import annotations

from monoflow.layout.table.entry import Entry, same

RULES: dict[str, Entry] = {
    **same("-> ...", "zeros ones full empty.memory_format empty_strided"),
    **same("-> ...!", "arange linspace logspace eye scalar_tensor randperm empty_permuted tril_indices triu_indices"),
    **same("., . -> ...!", "linspace.Tensor_Tensor logspace.Tensor_Tensor"),
    **same(". -> ...!", "linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor"),
    **same(
        "... -> ...",
        "zeros_like ones_like full_like empty_like bernoulli.p rand_like randn_like normal_functional uniform exponential randint_like "
        "cauchy geometric log_normal",
    ),
    **same("-> ...", "rand randn randint normal.float_float"),
    **same("...! -> ...", "new_zeros new_ones new_full new_empty new_empty_strided"),
    **same("... -> ...", "_to_copy"),
    "fill.Scalar": "... -> ...",
    "fill.Tensor": "..., . -> ...",
    "copy": "..., ... -> ...; linear 1",
    "zero": "... -> ...; linear 0",
    # Draws that depend on values are made of the whole.
    **same(
        "...! -> ...!", "bernoulli.default poisson _standard_gamma _sample_dirichlet multinomial normal.Tensor_float normal.float_Tensor"
    ),
    **same("...!, ...! -> ...!", "bernoulli.Tensor binomial normal.Tensor_Tensor"),
    "resize": "...! -> ...!",
    "resize_as": "...!, ...! -> ...!",
}
