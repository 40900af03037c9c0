"""Gathering and scattering by index."""

from __future__ import annotations

import torch

from monoflow.layout.call import Call, held, left_out, letters, term
from monoflow.layout.table.entry import Entry, same


def embedding(call: Call) -> str:
    return "v@ d, ... -> ... d; linear 0"


def embedding_backward(call: Call) -> str:
    return f"... d, ... -> v{'!' if call['scale_grad_by_freq'] else '@'} d; linear 0"


def gather(call: Call) -> str:
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim") or [0]
    same_size = all(a == b for d, (a, b) in enumerate(zip(call.shape("self"), call.shape("index"), strict=True)) if d != dim)
    if not names:
        return "., . -> .; linear 0"
    if not same_size:
        return f"{term([f'{n}!' for n in names])}, {term([f'{n}_!' for n in names])} -> {term([f'{n}_!' for n in names])}"
    source = term([f"{n}@" if d == dim else n for d, n in enumerate(names)])
    index = term(["i" + n if d == dim else n for d, n in enumerate(names)])
    return f"{source}, {index} -> {index}; linear 0"


def index(call: Call) -> str | None:
    """Advanced indexing: dimensions before the first index and after the last may be cut, where the indices are next to each other."""
    rank = call.rank("self")
    indices = list(call["indices"])
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(i is not None and str(i.dtype) in ("torch.bool", "torch.uint8") for i in indices):
        return None
    names = letters(rank, skip="xyz")
    together = given == list(range(given[0], given[-1] + 1))
    count = max(indices[d].dim() for d in given)
    wide = [f"x{k}" for k in range(count)]
    source = held(names, given)
    rest = left_out(names, given)
    at = given[0] if together else 0
    result = [*rest[:at], *wide, *rest[at:]]
    return (
        f"{term(source)}, [{term(wide)}] -> {term(result)}; linear 0"
        if _alike(call, given)
        else (f"{term(source)}, [...!] -> {term([n if n in rest else '1' for n in result])}; linear 0")
    )


def _alike(call: Call, given: list[int]) -> bool:
    return len({tuple(call["indices"][d].shape) for d in given}) == 1


def index_select(call: Call) -> str:
    whole, at, part = _rows(call, cut=call.rank("index") == 1)
    return f"{whole}, {at if call.rank('self') else term(['1'] * call.rank('index'))} -> {part}; linear 0"


def take(call: Call) -> str:
    """Where the index points depends on the whole; the index itself may be cut."""
    picked = term([f"i{k}" for k in range(call.rank("index"))])
    return f"{term([f'{n}!' for n in letters(call.rank('self'), skip='i')])}, {picked} -> {picked}; linear 0"


def _scattered(call: Call, mark: str = "!") -> tuple[str, str]:
    """Terms of what is written to, and of the index and the source: dimensions in which all have one size may be cut."""
    names = letters(call.rank("self"))
    if not names:
        return ".", term(["1"] * call.rank("index"))
    (dim,) = call.dims("dim")
    shapes = [call.shape(n) for n in ("self", "index", "src") if isinstance(call.args.get(n), torch.Tensor)]
    alike = [len({s[d] for s in shapes}) == 1 for d in range(len(names))]
    whole = [f"{n}{mark}" if d == dim else n if alike[d] else f"{n}!" for d, n in enumerate(names)]
    return term(whole), term(["1" if d == dim or not alike[d] else n for d, n in enumerate(names)])


def scatter_add(call: Call) -> str:
    """Added where the index says; linear in what is added to and what is added, together."""
    whole, part = _scattered(call, mark="@")
    return f"{whole}, {part}, {part} -> {whole}; linear 0 2"


def scatter(call: Call) -> str:
    whole, part = _scattered(call)
    return f"{whole}, {part}, {part} -> {whole}; linear 0 2"


def scatter_value(call: Call) -> str:
    whole, part = _scattered(call)
    return f"{whole}, {part} -> {whole}"


def scatter_reduce(call: Call) -> str:
    whole, part = _scattered(call)
    return f"{whole}, {part}, {part} -> {whole}"


def _rows(call: Call, cut: bool = False) -> tuple[str, str, str]:
    """Terms of a tensor indexed along one dimension, of the index, and of what has the index's length there."""
    names = letters(call.rank("self"), skip="i")
    (dim,) = call.dims("dim") or [0]
    i = "i" if cut else "i!"
    whole = held(names, [dim])
    part = [i if d == dim else n for d, n in enumerate(names)]
    return term(whole), term([i] * call.rank("index")), term(part)


def index_fill(call: Call) -> str:
    whole, at, _ = _rows(call)
    value = ", ." if isinstance(call["value"], torch.Tensor) else ""
    return f"{whole}, {at}{value} -> {whole}"


def index_copy(call: Call) -> str:
    whole, at, part = _rows(call)
    return f"{whole}, {at}, {_source(call, part)} -> {whole}; linear 0 2"


def index_reduce(call: Call) -> str:
    whole, at, part = _rows(call)
    return f"{whole}, {at}, {_source(call, part)} -> {whole}"


def index_add(call: Call) -> str:
    """A cut index adds its rows to a term of the whole."""
    whole, at, part = _rows(call, cut=call.rank("index") == 1 and call.rank("source") == call.rank("self") > 0)
    return f"+{whole}, {at}, {_source(call, part)} -> {whole}; linear 0 2"


def _source(call: Call, part: str) -> str:
    """The source may be a scalar where the index is one."""
    return part if call.rank("source") == call.rank("self") else term(["1"] * call.rank("source"))


def masked_index(call: Call) -> str:
    """Dimensions before the first index may be cut."""
    names = letters(call.rank("self"))
    given = [d for d, i in enumerate(call["indices"]) if i is not None]
    first = min(given, default=len(names))
    result = names[:first] + ["1"] * (call.result.dim() - first)
    source = names[:first] + [f"{n}!" for n in names[first:]]
    line = f"{term(source)}, ...!, [...!] -> {term(result)}"
    return f"{line}; linear 0" if call["fill"] == 0 else line


def searchsorted(call: Call) -> str:
    if call.rank("sorted_sequence") == 1:
        return "s!, ..., s! -> ..."
    return "... s!, ... v, ... s! -> ... v"


def isin(call: Call) -> str:
    tested = term([f"t{i}" for i in range(call.rank("test_elements"))])
    kind = "all" if call["invert"] else "any"
    elements = "..., " if "elements" in call.args else ""
    reduced = f"; {kind} {tested}" if call.rank("test_elements") else ""
    return f"{elements}{tested} -> {'...' if elements else '.'}{reduced}"


RULES: dict[str, Entry] = {
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "gather": gather,
    "index.Tensor": index,
    "take": take,
    "scatter_add": scatter_add,
    "scatter.src": scatter,
    "scatter.value": scatter_value,
    "scatter.value_reduce": scatter_value,
    **same(scatter_reduce, "scatter_reduce.two scatter.reduce"),
    "index_select": index_select,
    "index_fill": index_fill,
    "index_copy": index_copy,
    "index_reduce": index_reduce,
    "index_add": index_add,
    "isin": isin,
    "bucketize.Tensor": "..., b! -> ...",
    "bucketize.Scalar": "b! -> .",
    "searchsorted.Tensor": searchsorted,
    "searchsorted.Scalar": "s!, s! -> .",
    "_unsafe_masked_index": masked_index,
    # Which element goes where depends on all of them.
    "_unsafe_masked_index_put_accumulate": "...!, ...!, [...!], ...! -> ...!; linear 0 3",
    **same("...!, [...!], ...! -> ...!", "index_put _unsafe_index_put"),
    **same("...!, ...!, ...! -> ...!", "put masked_scatter"),
    "masked_scatter_backward": "...!, ...! -> ...!; linear 0",
    "nonzero_static": "...! -> ...!",
}
