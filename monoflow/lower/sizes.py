"""Arguments that are shapes, or sizes: of the result, of another argument, or of one dimension of it."""

from __future__ import annotations

from typing import TypeAlias

Source: TypeAlias = str | tuple[str, int]
"""`"result"`, the name of an argument, or (the name of an argument, a dimension)."""


def _alike(argument: str, names: str) -> dict[str, dict[str, Source]]:
    return {name: {argument: "result"} for name in names.split()}


SIZES: dict[str, dict[str, Source]] = {
    **_alike(
        "size",
        "view _unsafe_view view_copy _reshape_copy expand expand_copy zeros ones full empty empty_strided rand randn new_zeros new_ones "
        "new_full new_empty new_empty_strided randint",
    ),
    **_alike("shape", "reshape"),
    **_alike("input_sizes", "slice_backward select_backward diagonal_backward unfold_backward"),
    **_alike(
        "input_size",
        "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
        "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bilinear2d_backward "
        "upsample_trilinear3d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward "
        "_upsample_lanczos2d_aa_backward",
    ),
    "native_group_norm": {"N": ("input", 0)},
    "native_group_norm_backward": {"N": ("input", 0)},
}
