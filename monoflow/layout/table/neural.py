"""Layers: normalisation, attention, convolution, losses."""

from __future__ import annotations

from monoflow.layout.call import Call, letters, term
from monoflow.layout.table.entry import Entry, same


def layer_norm(call: Call) -> str:
    rank, n = call.rank("input"), len(call["normalized_shape"])
    rows = letters(rank - n)
    whole = [f"z{i}!" for i in range(n)]
    ones = ["1"] * n
    return f"{term(rows + whole)}, {term(whole)}, {term(whole)} -> {term(rows + whole)}, {term(rows + ones)}, {term(rows + ones)}"


def layer_norm_backward(call: Call) -> str:
    rank, n = call.rank("input"), len(call["normalized_shape"])
    rows = letters(rank - n)
    whole = [f"z{i}!" for i in range(n)]
    full, stat, own = term(rows + whole), term(rows + ["1"] * n), term(whole)
    return f"{full}, {full}, {stat}, {stat}, {own}, {own} -> {full}, {own}, {own}; linear 0"


def convolution(call: Call) -> str:
    space = ["1"] * (call.rank("input") - 2)
    out = "o" if call["groups"] == 1 else "o!"
    return f"{term(['n', 'c!', *space])}, {term([out, 'k!', *space])}, {out} -> {term(['n', out, *space])}; linear 0 2 | 1 2"


def convolution_backward(call: Call) -> str:
    space = ["1"] * (call.rank("input") - 2)
    out = "o" if call["groups"] == 1 else "o!"
    grad, x, w = term(["n", out, *space]), term(["n", "c!", *space]), term([out, "k!", *space])
    return f"{grad}, {x}, {w} -> {x}, {w}, {out}; linear 0"


def attention(call: Call) -> str:
    q, kv = "b+ h+ s! d!", "b+ h+ t! d!"
    return f"{q}, {kv}, {kv}, {_mask(call)} -> {q}, b+ h+ s!"


def attention_backward(call: Call) -> str:
    q, kv = "b+ h+ s! d!", "b+ h+ t! d!"
    return f"{q}, {q}, {kv}, {kv}, {q}, b+ h+ s!, {_mask(call)} -> {q}, {kv}, {kv}; linear 0"


def _mask(call: Call) -> str:
    mask = call.args.get("attn_mask")
    return {2: "s! t!", 3: "h s! t!", 4: "b h s! t!"}.get(mask.dim() if mask is not None else 4, "...!")


def nll_loss(call: Call) -> str:
    n = "" if call.rank("self") == 1 else "n"
    row = f"{n} c!".strip()
    if call["reduction"] == 0:
        return f"{row}, {n or '.'}, c! -> {n or '.'}, ."
    mark = "n!" if call["reduction"] == 1 and n else n
    return f"{mark} c!, {mark or '.'}, c! -> ., .".strip()


def nll_loss_backward(call: Call) -> str:
    n = "" if call.rank("self") == 1 else "n"
    row = f"{n} c!".strip()
    grad = n or "." if call["reduction"] == 0 else "."
    return f"{grad}, {row}, {n or '.'}, c!, . -> {row}; linear 0"


def batch_norm(call: Call) -> str:
    space = ["1"] * (call.rank("input") - 2)
    training = call["training"]
    n = "n!" if training else "n"
    stats = ", ".join(["c"] * (len(call.results) - 1))
    x = term([n, "c", *space])
    if not training:
        return (
            f"{x}, c, c, c, c -> {x}, {stats}"
            if all(r.numel() for r in call.results[1:])
            else f"{x}, c, c, c, c -> {x}, " + ", ".join(["1"] * (len(call.results) - 1))
        )
    return f"{x}, c, c, c, c -> {x}, {stats}"


def batch_norm_backward(call: Call) -> str:
    space = ["1"] * (call.rank("input") - 2)
    n = "n!" if call["train"] else "n"
    x = term([n, "c", *space])
    save = "c" if call["train"] else "1"
    return f"{x}, {x}, c, c, c, {save}, {save} -> {x}, c, c; linear 0"


def pool_with_indices(call: Call) -> str:
    lead = ["n", "c"][2 - (call.rank("self") - 2) :] if call.rank("self") < 4 else ["n", "c"]
    space = ["1"] * (call.rank("self") - len(lead))
    x = term([*lead, *space])
    return f"{x} -> {x}, {x}"


def pool_backward(call: Call) -> str:
    lead = ["n", "c"] if call.rank("self") >= 4 else ["c"]
    space = ["1"] * (call.rank("self") - len(lead))
    x = term([*lead, *space])
    return f"{x}, {x}, {x} -> {x}; linear 0"


RULES: dict[str, Entry] = {
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "nll_loss_forward": nll_loss,
    "nll_loss_backward": nll_loss_backward,
    **same(batch_norm, "_native_batch_norm_legit_functional native_batch_norm"),
    "native_batch_norm_backward": batch_norm_backward,
    "max_pool2d_with_indices": pool_with_indices,
    "max_pool2d_with_indices_backward": pool_backward,
    "tril": lambda call: along_last_two(call),
    "triu": lambda call: along_last_two(call),
}


def along_last_two(call: Call) -> str:
    """Batch dimensions are cut, the matrices stay whole."""
    return "... m! n! -> ... m! n!; linear 0"
