"""Reductions over dimensions, and what works along a dimension."""

from __future__ import annotations

from monoflow.layout.call import Call, held, letters, term
from monoflow.layout.table.entry import Entry, same


def _dims(call: Call) -> list[int]:
    return call.dims("dim") if "dim" in call.args else list(range(call.rank("self")))


def reduced(call: Call, mark: str = "", option: str = "", linear: bool = False, results: int = 1) -> str:
    """A reduction over `dim` (all dimensions where it is None), with `keepdim` or without."""
    names = letters(call.rank("self"))
    dims = _dims(call)
    keep = call.args.get("keepdim", False)
    left = [f"{n}{mark}" if d in dims else n for d, n in enumerate(names)]
    right = [n if d not in dims else "1" for d, n in enumerate(names) if d not in dims or keep]
    line = f"{term(left)} -> {', '.join([term(right)] * results)}"
    cut = [names[d] for d in dims]
    if option and cut:
        line += f"; {option} {' '.join(cut)}"
    return line + ("; linear 0" if linear else "")


def summed(call: Call) -> str:
    return reduced(call, linear=True)


def averaged(call: Call) -> str:
    return reduced(call, mark="!", linear=True)


def along(call: Call) -> str:
    """Results of the shape of the argument, that depend on all of a dimension."""
    names = letters(call.rank("self"))
    dims = call.dims("dim")
    left = held(names, dims)
    return f"{term(left)} -> {', '.join([term(left)] * len(call.results))}"


def softmax_backward(call: Call) -> str:
    names = letters(call.rank("output"))
    dims = call.dims("dim", of="output")
    own = term(held(names, dims))
    return f"{own}, {own} -> {own}; linear 0"


def histogram(call: Call) -> str:
    """Counts of pieces add up where the bins do not depend on the values."""
    fixed = call["min"] < call["max"]
    return f"...{'' if fixed else '!'} -> b!"


RULES: dict[str, Entry] = {
    "histc": histogram,
    "histogram.bins_tensor": "...!, ...!, ...! -> ...!, ...!",
    "histogram.bin_ct": "...!, ...! -> ...!, ...!",
    "_histogramdd_bin_edges": "...!, ...! -> [...!]",
    "_histogramdd_from_bin_cts": "...!, ...! -> ...!",
    **same(summed, "sum"),
    **same(averaged, "mean"),
    **same(lambda call: reduced(call, "+", "max"), "amax max.default"),
    **same(lambda call: reduced(call, "+", "min"), "amin min.default"),
    **same(lambda call: reduced(call, "", "any"), "any"),
    **same(lambda call: reduced(call, "", "all"), "all"),
    **same(lambda call: reduced(call, "", "prod"), "prod"),
    **same(
        lambda call: reduced(call, "!"),
        "argmax argmin var std var.correction std.correction linalg_vector_norm norm logsumexp std_mean var_mean nansum "
        "hash_tensor median.default nanmedian.default",
    ),
    **same(
        lambda call: reduced(call, "!", results=2),
        "max.dim min.dim median.dim mode var_mean.correction std_mean.correction kthvalue nanmedian.dim",
    ),
    **same(along, "_softmax _log_softmax _safe_softmax cumsum cumprod sort topk cummax cummin logcumsumexp"),
    **same(softmax_backward, "_softmax_backward_data _log_softmax_backward_data"),
}
