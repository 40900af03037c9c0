"""Gathering and scattering by index."""

from __future__ import annotations

from monoflow.layout.call import Call, letters, term
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
    source = [f"{n}!" if d in given else n for d, n in enumerate(names)]
    rest = [n for d, n in enumerate(names) if d not in given]
    at = given[0] if together else 0
    result = [*rest[:at], *wide, *rest[at:]]
    return (
        f"{term(source)}, [{_broadcast(count)}] -> {term(result)}; linear 0"
        if _alike(call, given)
        else (f"{term(source)}, [...!] -> {term([n if n in rest else '1' for n in result])}; linear 0")
    )


def _alike(call: Call, given: list[int]) -> bool:
    return len({tuple(call["indices"][d].shape) for d in given}) == 1


def _broadcast(count: int) -> str:
    return term([f"x{k}" for k in range(count)])


def index_select(call: Call) -> str:
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim") or [0]
    left = [f"{n}!" if d == dim else n for d, n in enumerate(names)]
    right = ["i" if d == dim else n for d, n in enumerate(names)]
    return f"{term(left)}, i -> {term(right)}; linear 0"


def scatter_add(call: Call) -> str:
    """Added where the index says; linear in what is added to and what is added, together."""
    names = letters(call.rank("self"))
    if not names:
        return "., ., . -> .; linear 0 2"
    (dim,) = call.dims("dim")
    sizes = zip(call.shape("self"), call.shape("index"), call.shape("src"), strict=True)
    same_size = [len({a, b, c}) == 1 for a, b, c in sizes]
    kept = [n if same_size[d] else f"{n}!" for d, n in enumerate(names)]
    source = term([f"{n}@" if d == dim else kept[d] for d, n in enumerate(names)])
    index = term(["1" if d == dim or not same_size[d] else n for d, n in enumerate(names)])
    return f"{source}, {index}, {index} -> {source}; linear 0 2"


RULES: dict[str, Entry] = {
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "gather": gather,
    "index.Tensor": index,
    "scatter_add": scatter_add,
    "index_select": index_select,
    **same("...!, [...!], ...! -> ...!", "index_put _unsafe_index_put"),
}
