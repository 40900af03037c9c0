"""Ops that look at the same elements in another arrangement: views, and copies that only rearrange."""

from __future__ import annotations

import math
from collections.abc import Iterator

from monoflow.layout.call import Call, changed, held, left_out, letters, normal_dims, term
from monoflow.layout.table.entry import Entry, same


def reshaped(before: tuple[int, ...], after: tuple[int, ...]) -> str | None:
    """The line of a reshape.

    Dimensions are matched from the left in the smallest blocks that hold the same elements; within a block, factors are split off as long
    as the sizes divide; what is left of the block stays whole.
    """
    names = iter(letters(100))
    left: list[str] = []
    right: list[str] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if math.prod(before[i:]) == 0 or math.prod(after[j:]) == 0:
            left += [f"{next(names)}!" for _ in before[i:]]
            right += [f"{next(names)}!" for _ in after[j:]]
            break
        if i < len(before) and before[i] == 1:
            left.append("1")
            i += 1
            continue
        if j < len(after) and after[j] == 1:
            right.append("1")
            j += 1
            continue
        a, b = [before[i]], [after[j]]
        i, j = i + 1, j + 1
        while math.prod(a) != math.prod(b):
            if math.prod(a) < math.prod(b):
                a.append(before[i])
                i += 1
            else:
                b.append(after[j])
                j += 1
        one, other = _block(a, b, names)
        left += one
        right += other
    return f"{term(left)} -> {term(right)}; linear 0"


def _block(before: list[int], after: list[int], names: Iterator[str]) -> tuple[list[str], list[str]]:
    """The factors of dimensions that together hold the same elements."""
    left: list[list[str]] = [[]]
    right: list[list[str]] = [[]]
    a, b = list(before), list(after)
    while a and b:
        if a[0] == b[0]:
            size = a[0]
        elif a[0] % b[0] == 0 or b[0] % a[0] == 0:
            size = min(a[0], b[0])
        else:  # sizes that do not divide: from here on whole
            rest = [f"{next(names)}!"]
            left[-1] += rest
            right[-1] += rest
            left += [[f"{next(names)}!"] for _ in a[1:]]
            right += [[f"{next(names)}!"] for _ in b[1:]]
            return _texts(left), _texts(right)
        name = next(names)
        left[-1].append(name)
        right[-1].append(name)
        a[0] //= size
        b[0] //= size
        if a[0] == 1:
            a.pop(0)
            if a:
                left.append([])
        if b[0] == 1:
            b.pop(0)
            if b:
                right.append([])
    return _texts(left), _texts(right)


def _texts(dims: list[list[str]]) -> list[str]:
    return [d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims]


def view(call: Call) -> str | None:
    return reshaped(call.shape("self"), tuple(call.result.shape))


def permuted(call: Call, order: list[int]) -> str:
    names = letters(call.rank("self"))
    return f"{term(names)} -> {term([names[d] for d in order])}; linear 0"


def transpose(call: Call) -> str:
    order = list(range(call.rank("self")))
    if order:
        a, b = (normal_dims(call[name], len(order))[0] for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return permuted(call, order)


def transposed(call: Call) -> str:
    return permuted(call, list(reversed(range(call.rank("self")))))


def permute(call: Call) -> str:
    return permuted(call, normal_dims(call["dims"], call.rank("self")) if call["dims"] else [])


def expand(call: Call) -> str:
    shape, result = call.shape("self"), tuple(call.result.shape)
    names = letters(len(result))
    inside = names[len(result) - len(shape) :]
    own = [n if size == wide else "1" for n, size, wide in zip(inside, shape, result[len(result) - len(shape) :], strict=True)]
    return f"{term(own)} -> {term(names)}; linear 0"


def along_dim(call: Call, dims: list[int]) -> str:
    """Dimensions that stay are cut together; the changed ones stay whole."""
    names = letters(call.rank("self"))
    left = held(names, dims)
    right = changed(names, dims)
    return f"{term(left)} -> {term(right)}; linear 0"


def slice_(call: Call) -> str:
    if call.shape("self") == tuple(call.result.shape):
        return "... -> ...; linear 0"
    return along_dim(call, call.dims("dim"))


def select(call: Call) -> str:
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim")
    left = held(names, [dim])
    return f"{term(left)} -> {term(left_out(names, [dim]))}; linear 0"


def split(call: Call) -> str:
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim")
    left = held(names, [dim])
    right = changed(names, [dim])
    return f"{term(left)} -> [{term(right)}]; linear 0"


def unbind(call: Call) -> str:
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim")
    left = held(names, [dim])
    return f"{term(left)} -> [{term(left_out(names, [dim]))}]; linear 0"


def cat(call: Call) -> str | None:
    rank = call.result.dim()
    if any(t.dim() != rank for t in call["tensors"]):  # empty tensors of one dimension are let through by PyTorch
        return "[...!] -> ...!"
    (dim,) = normal_dims(call["dim"], rank)
    names = letters(rank)
    left = held(names, [dim])
    right = changed(names, [dim])
    return f"[{term(left)}] -> {term(right)}; linear 0"


def stack(call: Call) -> str:
    rank = call.result.dim()
    (dim,) = normal_dims(call["dim"], rank)
    names = letters(rank - 1)
    return f"[{term(names)}] -> {term([*names[:dim], '1', *names[dim:]])}; linear 0"


def padded(call: Call) -> str:
    """constant_pad_nd: padded dimensions stay whole; linear only where zeros are put around."""
    rank = call.rank("self")
    padded = [rank - 1 - i for i in range(len(call["pad"]) // 2) if call["pad"][2 * i] or call["pad"][2 * i + 1]]
    line = along_dim(call, padded)
    return line if call["value"] == 0 else line.split(";")[0]


def _backward(call: Call, removed: bool) -> str:
    rank = call.result.dim()
    (dim,) = normal_dims(call["dim"], rank)
    names = letters(rank)
    left = left_out(names, [dim]) if removed else held(names, [dim])
    right = changed(names, [dim])
    return f"{term(left)} -> {term(right)}; linear 0"


def scattered(call: Call) -> str:
    """slice_scatter and the like: linear in both jointly."""
    names = letters(call.rank("self"))
    (dim,) = call.dims("dim")
    whole = changed(names, [dim])
    removed = call.rank("src") < len(names)
    part = left_out(names, [dim]) if removed else whole
    return f"{term(whole)}, {term(part)} -> {term(whole)}; linear 0 1"


def flip(call: Call) -> str:
    return along_dim(call, call.dims("dims"))


def diagonal(call: Call) -> str:
    left, rest = _without(call, call.rank("self"))
    return f"{term(left)} -> {term([*rest, '1'])}; linear 0"


def diagonal_backward(call: Call) -> str:
    left, rest = _without(call, call.result.dim())
    return f"{term([*rest, '1'])} -> {term(left)}; linear 0"


def diagonal_scatter(call: Call) -> str:
    left, rest = _without(call, call.rank("self"))
    return f"{term(left)}, {term([*rest, '1'])} -> {term(left)}; linear 0 1"


def _without(call: Call, rank: int) -> tuple[list[str], list[str]]:
    """Factors of a tensor whose dim1 and dim2 stay whole, and the others of them."""
    dims = normal_dims([call["dim1"], call["dim2"]], rank)
    names = letters(rank)
    return held(names, dims), left_out(names, dims)


def unfold(call: Call) -> str:
    names = letters(call.rank("self"))
    dims = normal_dims(call["dimension"], len(names))
    left = held(names, dims)
    right = changed(names, dims)
    return f"{term(left)} -> {term([*right, '1'] if names else ['1'])}; linear 0"


def unfold_backward(call: Call) -> str:
    names = letters(call.result.dim())
    dims = normal_dims(call["dim"], len(names))
    left = changed(names, dims)
    right = held(names, dims)
    return f"{term([*left, '1'] if names else ['1'])} -> {term(right)}; linear 0"


def as_real(call: Call) -> str:
    names = letters(call.rank("self"))
    return f"{term(names)} -> {term([*names, '1'])}; linear 0"


def as_complex(call: Call) -> str:
    names = letters(call.result.dim())
    return f"{term([*names, '1'])} -> {term(names)}; linear 0"


RULES: dict[str, Entry] = {
    **same(
        view,
        "view.default _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten view_copy _reshape_copy unsqueeze_copy squeeze_copy",
    ),
    **same(
        "... -> ...; linear 0",
        "detach alias lift_fresh lift contiguous view_of lift_fresh_copy clone alias_copy detach_copy _conj _conj_physical _neg_view",
    ),
    "transpose.int": transpose,
    **same(transposed, "t numpy_T mT"),
    "permute": permute,
    "expand": expand,
    "slice.Tensor": slice_,
    "select.int": select,
    **same(split, "split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes chunk tensor_split unsafe_chunk"),
    "unbind.int": unbind,
    "cat": cat,
    "stack": stack,
    "constant_pad_nd": padded,
    "slice_backward": lambda call: _backward(call, False),
    "select_backward": lambda call: _backward(call, True),
    **same(scattered, "slice_scatter select_scatter"),
    "flip": flip,
    "roll": flip,
    **same(diagonal, "diagonal diagonal_copy"),
    "diagonal_backward": diagonal_backward,
    "diagonal_scatter": diagonal_scatter,
    **same(unfold, "unfold unfold_copy"),
    "unfold_backward": unfold_backward,
    **same(as_real, "view_as_real view_as_real_copy"),
    **same(as_complex, "view_as_complex view_as_complex_copy"),
    # What these look at is memory, which pieces do not have alike.
    **same("...! -> ...!; linear 0", "as_strided as_strided_copy"),
    "as_strided_scatter": "...!, ...! -> ...!; linear 0 1",
}
