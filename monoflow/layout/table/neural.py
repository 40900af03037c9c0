"""Layers: normalisation, attention, convolution, losses."""

from __future__ import annotations

import torch

from monoflow.layout.call import Call, letters, term
from monoflow.layout.table.entry import Entry, same, whole


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
    """Over cut input channels the results are partial sums. Channels in groups stay whole."""
    x, w, out, result = _channels(call, backward=False)
    return f"{x}, {w}, +{out} -> {result}; linear 0 2 | 1 2"


def convolution_backward(call: Call) -> str:
    """Input channels are cut only where no gradient of the bias is asked for: it does not depend on them."""
    x, w, out, grad = _channels(call, backward=True)
    return f"{grad}, {x}, {w} -> {x}, {w}, {out}; linear 0"


def _channels(call: Call, backward: bool) -> tuple[str, str, str, str]:
    """Terms of the input, the weight, the bias and the result."""
    space = ["1"] * (call.rank("input") - 2)
    grouped = call["groups"] != 1
    out = "o!" if grouped else "o+"
    whole = grouped or (backward and call["output_mask"][2])
    c, k = ("c!", "k!") if whole else ("c+", "c+")
    weight = [k, "p!" if grouped else out] if call["transposed"] else [out, k]
    if grouped and call["transposed"]:
        weight = ["k!", "p!"]
    return term(["n", c, *space]), term([*weight, *space]), out, term(["n", out, *space])


def group_norm(call: Call) -> str:
    x = _samples(call)
    return f"{x}, c!, c! -> {x}, n g!, n g!"


def group_norm_backward(call: Call) -> str:
    x = _samples(call)
    return f"{x}, {x}, n g!, n g!, c! -> {x}, c!, c!; linear 0"


def _samples(call: Call) -> str:
    return term(["n+", "c!", *["1"] * (call.rank("input") - 2)])


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
    """Of the statistics that come back, those of training are one number for each channel, others may be empty."""
    training = call.args.get("training", call.target._schema.name != "aten::_native_batch_norm_legit_no_training")
    x = _images(call, training or len(call.results) > 3)  # statistics handed through would be counted once a piece
    stats = ["c" if r.dim() == 1 and r.shape[0] == call.shape("input")[1] else "1" for r in call.results[1:]]
    statistics = ", c, c" if "running_mean" in call.args else ""
    return f"{x}, c, c{statistics} -> {', '.join([x, *stats])}"


def batch_norm_backward(call: Call) -> str:
    """The last argument of the newer op is memory of its own, always whole."""
    train = bool(call.args.get("train", call.args.get("update")))
    x = _images(call, train)
    save = ["c" if call[n] is None or call[n].numel() == call.shape("input")[1] else "1" for n in ("save_mean", _save_var(call))]
    reserve = ", 1" if "reserve" in call.args else ""
    return f"{x}, {x}, c, c, c, {', '.join(save)}{reserve} -> {x}, c, c; linear 0"


def _save_var(call: Call) -> str:
    return "save_invstd" if "save_invstd" in call.args else "save_var"


def _images(call: Call, whole_batch: bool) -> str:
    return term(["n!" if whole_batch else "n", "c+", *["1"] * (call.rank("input") - 2)])


def fractional_max_pool(call: Call) -> str:
    """The random numbers have a batch dimension even where the input has none."""
    space = len(call["kernel_size"])
    whole, small = " ".join(f"x{i}!" for i in range(space)), " ".join(f"u{i}!" for i in range(space))
    lead, drawn = ("n+ c+", "n c r!") if call.rank("self") == space + 2 else ("c+", "1 c r!")
    return f"{lead} {whole}, {drawn} -> {lead} {small}, {lead} {small}"


def _resampled(space: int, results: int = 1, linear: bool = True) -> str:
    """Dimensions of space change as a whole; the leading ones may be cut."""
    before, after = " ".join(f"x{i}!" for i in range(space)), " ".join(f"u{i}!" for i in range(space))
    return f"...+ {before} -> {', '.join([f'...+ {after}'] * results)}" + ("; linear 0" if linear else "")


def _resampled_backward(space: int, arguments: int) -> str:
    """The gradient first; then what has the shape of the input, and indices of the shape of the gradient."""
    before, after = " ".join(f"x{i}!" for i in range(space)), " ".join(f"u{i}!" for i in range(space))
    terms = [f"...+ {after}", f"...+ {before}", f"...+ {after}"][:arguments]
    return f"{', '.join(terms)} -> ...+ {before}; linear 0"


def margin_loss(call: Call) -> str:
    row, target, loss = _rows(call)
    return f"{row}, {target}, c! -> {loss}"


def margin_loss_backward(call: Call) -> str:
    row, target, loss = _rows(call)
    return f"{loss}, {row}, {target}, c! -> {row}; linear 0"


def multilabel_margin_loss(call: Call) -> str:
    row, _, loss = _rows(call)
    return f"{row}, {row} -> {loss}, {row}"


def multilabel_margin_loss_backward(call: Call) -> str:
    row, _, loss = _rows(call)
    return f"{loss}, {row}, {row}, {row} -> {row}; linear 0"


def _rows(call: Call) -> tuple[str, str, str]:
    """Terms of scores by row and class, of a class for each row, and of the loss; there may be one row without a dimension for it."""
    if call.rank("self") < 2:
        return term(["c!"] * call.rank("self")), term(["1"] * call.rank("target")), "."
    n = "n!" if call["reduction"] == 1 else "n"
    return f"{n} c!", n, "n" if call["reduction"] == 0 else "."


def cross_entropy_with_logits(call: Call) -> str:
    return "..., ..., ..., ... -> ..." if call["reduction"] == 0 else "...!, ...!, ...!, ...! -> ."


def embedding_bag(call: Call) -> str:
    return f"v! d, i!, o!, i! -> b! d, x!, y!, {_largest(call.results[3])}"


def embedding_bag_backward(call: Call) -> str:
    offsets = "o!, " if "offsets" in call.args else ""
    return f"b! d, i!, {offsets}i!, z!, {_largest(call['maximum_indices'])}, i! -> v! d; linear 0"


def _largest(indices: torch.Tensor) -> str:
    """Where each maximum was found, if it is maxima that are asked for."""
    return "b! d" if indices.dim() == 2 else term(["m!"] * indices.dim())


RULES: dict[str, Entry] = {
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "nll_loss_forward": nll_loss,
    "nll_loss_backward": nll_loss_backward,
    **same(
        batch_norm,
        "_native_batch_norm_legit_functional native_batch_norm _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training "
        "_batch_norm_with_update_functional",
    ),
    **same(batch_norm_backward, "native_batch_norm_backward batch_norm_backward"),
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
    **same(_resampled(1), "reflection_pad1d replication_pad1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    **same(_resampled(2), "avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d reflection_pad2d replication_pad2d upsample_nearest2d"),
    **same(_resampled(2), "_upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa"),
    **same(_resampled(2), "_upsample_bicubic2d_aa _upsample_lanczos2d_aa"),
    **same(_resampled(3), "avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d reflection_pad3d replication_pad3d upsample_nearest3d"),
    **same(_resampled(3), "_upsample_nearest_exact3d upsample_trilinear3d"),
    **same(_resampled(2, results=2, linear=False), "max_pool2d_with_indices adaptive_max_pool2d"),
    **same(_resampled(3, results=2, linear=False), "max_pool3d_with_indices adaptive_max_pool3d"),
    **same(_resampled_backward(1, 1), "upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward"),
    **same(_resampled_backward(2, 1), "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward"),
    **same(_resampled_backward(2, 1), "upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"),
    **same(_resampled_backward(2, 1), "_upsample_lanczos2d_aa_backward"),
    **same(_resampled_backward(3, 1), "upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward"),
    **same(_resampled_backward(1, 2), "reflection_pad1d_backward replication_pad1d_backward"),
    **same(_resampled_backward(2, 2), "reflection_pad2d_backward replication_pad2d_backward avg_pool2d_backward"),
    "_adaptive_avg_pool2d_backward": _resampled_backward(2, 2),
    **same(_resampled_backward(3, 2), "reflection_pad3d_backward replication_pad3d_backward avg_pool3d_backward"),
    "_adaptive_avg_pool3d_backward": _resampled_backward(3, 2),
    **same(_resampled_backward(2, 3), "max_pool2d_with_indices_backward adaptive_max_pool2d_backward fractional_max_pool2d_backward"),
    **same(_resampled_backward(3, 3), "max_pool3d_with_indices_backward adaptive_max_pool3d_backward fractional_max_pool3d_backward"),
    **same(fractional_max_pool, "fractional_max_pool2d fractional_max_pool3d"),
    "grid_sampler_2d": "n+ c+ h! w!, n x+ y+ r! -> n c x y; linear 0",
    "grid_sampler_2d_backward": "n+ c+ x+ y+, n c h! w!, n x y r! -> n c h! w!, n x y r!; linear 0",
    "grid_sampler_3d": "n+ c+ d! h! w!, n x+ y+ z+ r! -> n c x y z; linear 0",
    "grid_sampler_3d_backward": "n+ c+ x+ y+ z+, n c d! h! w!, n x y z r! -> n c d! h! w!, n x y z r!; linear 0",
    "multi_margin_loss": margin_loss,
    "multi_margin_loss_backward": margin_loss_backward,
    "multilabel_margin_loss_forward": multilabel_margin_loss,
    "multilabel_margin_loss_backward": multilabel_margin_loss_backward,
    "binary_cross_entropy_with_logits": cross_entropy_with_logits,
    **same(embedding_bag, "_embedding_bag _embedding_bag_forward_only"),
    **same(embedding_bag_backward, "_embedding_bag_backward _embedding_bag_dense_backward"),
    "_embedding_bag_per_sample_weights_backward": "b! d, v! d, i!, o!, i! -> i!; linear 0 | 1",
    # The chunks in which it works are those of the whole batch.
    **same(whole, "torch_nn::_linear_cross_entropy_batch_chunked torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"),
    "segment_reduce": "...!, ...!, ...!, ...! -> ...!",
    "_segment_reduce_backward": "...!, ...!, ...!, ...!, ...! -> ...!; linear 0",
    "rrelu_with_noise_functional": "...!, ...! -> ...!, ...!",
}
