"""Arguments that are shapes: of the result, or of another argument."""

from __future__ import annotations

SIZES: dict[str, dict[str, str]] = {
    **{
        name: {"size": "result"}
        for name in (
            "view",
            "_unsafe_view",
            "expand",
            "zeros",
            "ones",
            "full",
            "empty",
            "empty_strided",
            "rand",
            "randn",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "new_empty_strided",
            "randint",
        )
    },
    "reshape": {"shape": "result"},
    "slice_backward": {"input_sizes": "result"},
    "select_backward": {"input_sizes": "result"},
}
