"""Ops said again in simpler ones, for layouts that the op's own rule is too coarse for.

Vocabulary-parallel softmax, batch norm over a cut batch, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = x.float() if half_to_float else x
    shifted = x - aten.amax(x, [dim], True)
    return shifted - aten.log(aten.sum(aten.exp(shifted), [dim], True))


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    x = x.float() if half_to_float else x
    e = aten.exp(x - aten.amax(x, [dim], True))
    return e / aten.sum(e, [dim], True)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return aten._to_copy(grad - aten.exp(output) * aten.sum(grad, [dim], True), dtype=input_dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    weighted = grad * output
    return aten._to_copy(weighted - output * aten.sum(weighted, [dim], True), dtype=input_dtype)


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.div.Scalar(aten.sum(x, dtype=dtype), x.numel())


def mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    count = 1
    for d in dims:
        count *= x.shape[d]
    return aten.div.Scalar(aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype), count)


def nll_loss(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Mean: the sum over the sum of weights. Over cut classes: a masked gather."""
    if reduction == 1:
        total, weights = aten.nll_loss_forward(logp, target, weight, 2, ignore_index)
        return total / weights, weights
    dim = logp.dim() - 1
    kept = aten.ne.Scalar(target, ignore_index)
    safe = aten.where.self(kept, target, aten.zeros_like(target))
    picked = aten.squeeze.dim(aten.gather(logp, dim, aten.unsqueeze(safe, dim)), dim)
    weights = aten.index_select(weight, 0, aten.reshape(safe, [-1])).reshape(target.shape) if weight is not None else aten.ones_like(picked)
    weights = aten.where.self(kept, weights, aten.zeros_like(weights))
    losses = -picked * weights
    if reduction == 0:
        return losses, aten.zeros([], dtype=logp.dtype, device=logp.device)
    return aten.sum(losses), aten.sum(weights)


def nll_loss_backward(
    grad: Tensor, logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    dim = logp.dim() - 1
    kept = aten.ne.Scalar(target, ignore_index)
    safe = aten.where.self(kept, target, aten.zeros_like(target))
    weights = (
        aten.index_select(weight, 0, aten.reshape(safe, [-1])).reshape(target.shape)
        if weight is not None
        else aten.ones([*target.shape], dtype=logp.dtype)
    )
    weights = aten.where.self(kept, weights, aten.zeros_like(weights))
    grad = grad / total if reduction == 1 else grad
    each = aten.unsqueeze(-grad * weights, dim)
    return aten.scatter_add(aten.zeros_like(logp), dim, aten.unsqueeze(safe, dim), each)


def layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mu = mean_dim(x, dims, True)
    centred = x - mu
    rstd = aten.rsqrt(mean_dim(centred * centred, dims, True) + eps)
    out = centred * rstd
    out = out * weight if weight is not None else out
    return (out + bias if bias is not None else out), mu, rstd


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mu: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    rows = list(range(x.dim() - len(shape)))
    normed = (x - mu) * rstd
    inner = grad * weight if weight is not None else grad
    found = rstd * (inner - mean_dim(inner, dims, True) - normed * mean_dim(inner * normed, dims, True)) if mask[0] else None
    weights = (aten.sum.dim_IntList(grad * normed, rows) if rows else grad * normed) if mask[1] else None
    biases = (aten.sum.dim_IntList(grad, rows) if rows else aten.clone(grad)) if mask[2] else None
    return found, weights, biases


def _channels(x: Tensor, value: Tensor) -> Tensor:
    return aten.reshape(value, [1, value.shape[0], *[1] * (x.dim() - 2)])


def _normed(x: Tensor, mu: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = (x - _channels(x, mu)) * _channels(x, rstd)
    out = out * _channels(x, weight) if weight is not None else out
    return out + _channels(x, bias) if bias is not None else out


def _no_statistics(x: Tensor, count: int) -> list[Tensor]:
    return [aten.zeros([0], dtype=x.dtype, device=x.device) for _ in range(count)]


def batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


def batch_norm_evaluated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def batch_norm_with_update(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    out, mu, rstd, mean, var = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, mu, rstd, aten.zeros([0], dtype=torch.uint8, device=x.device), mean, var


def batch_norm_with_update_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mu: Tensor | None,
    rstd: Tensor | None,
    update: bool,
    eps: float,
    mask: list[bool],
    reserve: Tensor,
) -> tuple[Tensor | None, ...]:
    return batch_norm_backward(grad, x, weight, running_mean, running_var, mu, rstd, update, eps, mask)


def cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """-(w (p y log s(x) + (1 - y) log(1 - s(x)))), by softplus."""
    positive = aten.softplus(-x) * target
    positive = positive * pos_weight if pos_weight is not None else positive
    losses = positive + (1 - target) * aten.softplus(x)
    losses = losses * weight if weight is not None else losses
    if reduction == 0:
        return losses
    return mean(losses) if reduction == 1 else aten.sum(losses)


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: list[int], expand2: list[int], expand3: list[int], summed: list[int], unroll: int = 1
) -> Tensor:
    """A product of three, each with dimensions of size one put in, summed."""
    for dims, index in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for d in dims:
            a, b, c = (aten.unsqueeze(t, d) if i == index else t for i, t in enumerate((a, b, c)))
    return aten.sum.dim_IntList(a * b * c, summed) if summed else a * b * c


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Two passes over the whole batch: mean, then variance about it."""
    if not training:
        assert running_mean is not None and running_var is not None
        return _normed(x, running_mean, aten.rsqrt(running_var + eps), weight, bias), *_no_statistics(x, 2), running_mean, running_var
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    mu = mean_dim(x, dims)
    centred = x - _channels(x, mu)
    var = mean_dim(centred * centred, dims)
    rstd = aten.rsqrt(var + eps)
    out = _normed(x, mu, rstd, weight, bias)
    if running_mean is None or running_var is None:
        return out, mu, rstd
    unbiased = aten.mul.Scalar(var, count / max(count - 1, 1))
    return out, mu, rstd, running_mean * (1 - momentum) + mu * momentum, running_var * (1 - momentum) + unbiased * momentum


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mu: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    if not train:
        assert running_mean is not None and running_var is not None
        mu, rstd = running_mean, aten.rsqrt(running_var + eps)
    assert mu is not None and rstd is not None
    dims = [0, *range(2, x.dim())]
    normed = (x - _channels(x, mu)) * _channels(x, rstd)
    summed, dotted = aten.sum.dim_IntList(grad, dims), aten.sum.dim_IntList(grad * normed, dims)
    count = x.numel() // x.shape[1]
    inner = (
        grad if not train else grad - _channels(x, aten.div.Scalar(summed, count)) - normed * _channels(x, aten.div.Scalar(dotted, count))
    )
    scale = rstd * weight if weight is not None else rstd
    return (inner * _channels(x, scale) if mask[0] else None), (dotted if mask[1] else None), (summed if mask[2] else None)


def vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A reduction of powers, and the root of it. As in PyTorch's kernel, half precision is for arguments and results only."""
    if x.dtype in (torch.bfloat16, torch.float16) and dtype is None:
        return aten._to_copy(vector_norm(x, ord, dim, keepdim, dtype=torch.float32), dtype=x.dtype)
    x = aten._to_copy(x, dtype=dtype) if dtype is not None else x
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    if ord == 2 and not x.is_complex():
        return aten.sqrt(aten.sum.dim_IntList(x * x, dims, keepdim))
    size = aten.abs(x)
    if ord == math.inf:
        return aten.amax(size, dims, keepdim)
    if ord == -math.inf:
        return aten.amin(size, dims, keepdim)
    if ord == 0:
        return aten.sum.dim_IntList(aten._to_copy(aten.ne.Scalar(x, 0), dtype=size.dtype), dims, keepdim)
    if ord == 1:
        return aten.sum.dim_IntList(size, dims, keepdim)
    if ord == 2:
        return aten.sqrt(aten.sum.dim_IntList(size * size, dims, keepdim))
    return aten.pow.Tensor_Scalar(aten.sum.dim_IntList(aten.pow.Tensor_Scalar(size, ord), dims, keepdim), 1 / ord)


def foreach_norm(tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [aten.linalg_vector_norm(t, ord, dtype=dtype) for t in tensors]


def var_correction(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Two passes: the mean, then the squares about it."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    centred = x - mean_dim(x, dims, True)
    count = math.prod(x.shape[d] for d in dims)
    total = aten.sum.dim_IntList(centred * centred, dims, keepdim)
    return aten.div.Scalar(total, max(count - (1 if correction is None else correction), 0))


def std_correction(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return aten.sqrt(var_correction(x, dim, correction=correction, keepdim=keepdim))


def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    largest = aten.amax(x, dims, True)
    finite = aten.where.self(aten.isinf(largest), aten.zeros_like(largest), largest)
    found = aten.log(aten.sum.dim_IntList(aten.exp(x - finite), dims, True)) + finite
    return found if keepdim else aten.squeeze.dims(found, dims)


EXPANSIONS: dict[str, Callable[..., Any]] = {
    "_log_softmax": log_softmax,
    "_softmax": softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "_softmax_backward_data": softmax_backward,
    "mean.default": mean,
    "mean.dim": mean_dim,
    "nll_loss_forward": nll_loss,
    "nll_loss_backward": nll_loss_backward,
    "native_layer_norm": layer_norm,
    "linalg_vector_norm": vector_norm,
    "_foreach_norm": foreach_norm,
    "var.correction": var_correction,
    "std.correction": std_correction,
    "logsumexp": logsumexp,
    "native_layer_norm_backward": layer_norm_backward,
    "_native_batch_norm_legit_functional": batch_norm,
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
    "_native_batch_norm_legit.no_stats": batch_norm_without_statistics,
    "_native_batch_norm_legit_no_training": batch_norm_evaluated,
    "_batch_norm_with_update_functional": batch_norm_with_update,
    "batch_norm_backward": batch_norm_with_update_backward,
    "binary_cross_entropy_with_logits": cross_entropy_with_logits,
    "_trilinear": trilinear,
}
"""Op -> a function of the same arguments."""
