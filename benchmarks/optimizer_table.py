"""Every optimizer of `torch.optim` that a step can use, in each of its variants.

LBFGS calls back into the user's code and SparseAdam takes sparse gradients only: neither can be part of a static graph. `capturable` and
`differentiable` are left out: the first does not exist on CPU, the second is for optimizing through an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim
from torch.nn import Parameter
from torch.optim import Optimizer

Make = Callable[[Iterable[Parameter]], Optimizer]


def _one_group(kind: Callable[..., Optimizer], **options: Any) -> Make:
    return lambda params: kind(list(params), **options)


def _matrices(**options: Any) -> Make:
    """Muon is for matrices; it gets those among the parameters."""
    return lambda params: optim.Muon([p for p in params if p.ndim == 2], **options)


def _two_groups(kind: Callable[..., Optimizer], lr: float, **options: Any) -> Make:
    """Matrices with weight decay, the rest without and at half the learning rate, as language models are usually trained."""

    def make(params: Iterable[Parameter]) -> Optimizer:
        params = list(params)
        decayed = {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": lr / 2}
        return kind([decayed, others], lr=lr, **options)

    return make


def _tensor_rate(kind: Callable[..., Optimizer], lr: float, **options: Any) -> Make:
    """The learning rate as a tensor, made anew for each optimizer since schedulers write into it."""
    return lambda params: kind(list(params), lr=torch.tensor(lr), **options)


_KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "SGD": (
        optim.SGD,
        {"lr": 0.05},
        {
            "": {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "maximize": {"maximize": True, "lr": 1e-3},
            "weight_decay": {"weight_decay": 0.1},
            "momentum": {"momentum": 0.9},
            "momentum dampening": {"momentum": 0.9, "dampening": 0.3},
            "momentum foreach": {"momentum": 0.9, "weight_decay": 0.1, "foreach": True},
            "momentum fused": {"momentum": 0.9, "weight_decay": 0.1, "fused": True},
            "nesterov": {"momentum": 0.9, "nesterov": True},
            "nesterov foreach": {"momentum": 0.9, "nesterov": True, "foreach": True},
            "nesterov fused": {"momentum": 0.9, "nesterov": True, "fused": True},
        },
    ),
    "Adam": (
        optim.Adam,
        {"lr": 0.01},
        {
            "": {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "maximize": {"maximize": True},
            "weight_decay": {"weight_decay": 0.1},
            "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
            "amsgrad": {"amsgrad": True},
            "amsgrad foreach": {"amsgrad": True, "foreach": True},
            "amsgrad fused": {"amsgrad": True, "fused": True},
        },
    ),
    "AdamW": (
        optim.AdamW,
        {"lr": 0.01},
        {
            "": {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "maximize": {"maximize": True},
            "maximize fused": {"maximize": True, "fused": True},
            "amsgrad": {"amsgrad": True},
            "amsgrad foreach": {"amsgrad": True, "foreach": True},
            "amsgrad fused": {"amsgrad": True, "fused": True},
        },
    ),
    "Adagrad": (
        optim.Adagrad,
        {"lr": 0.05},
        {
            "": {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
            "maximize": {"maximize": True},
            "weight_decay lr_decay": {"weight_decay": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.1},
        },
    ),
    "Adadelta": (
        optim.Adadelta,
        {"lr": 1.0},
        {"": {}, "foreach": {"foreach": True}, "maximize": {"maximize": True}, "weight_decay": {"weight_decay": 0.1}},
    ),
    "Adamax": (
        optim.Adamax,
        {"lr": 0.01},
        {"": {}, "foreach": {"foreach": True}, "maximize": {"maximize": True}, "weight_decay": {"weight_decay": 0.1}},
    ),
    "NAdam": (
        optim.NAdam,
        {"lr": 0.01},
        {
            "": {},
            "foreach": {"foreach": True},
            "maximize": {"maximize": True},
            "weight_decay": {"weight_decay": 0.1},
            "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
        },
    ),
    "RAdam": (
        optim.RAdam,
        {"lr": 0.01},
        {
            "": {},
            "foreach": {"foreach": True},
            "maximize": {"maximize": True},
            "weight_decay": {"weight_decay": 0.1},
            "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
        },
    ),
    "RMSprop": (
        optim.RMSprop,
        {"lr": 0.01},
        {
            "": {},
            "foreach": {"foreach": True},
            "maximize": {"maximize": True},
            "weight_decay": {"weight_decay": 0.1},
            "momentum centered": {"momentum": 0.9, "centered": True},
            "momentum centered foreach": {"momentum": 0.9, "centered": True, "foreach": True},
        },
    ),
    "Rprop": (
        optim.Rprop,
        {"lr": 0.01},
        {"": {}, "foreach": {"foreach": True}, "maximize": {"maximize": True}},
    ),
    "ASGD": (
        optim.ASGD,
        {"lr": 0.05, "t0": 3.0, "lambd": 0.01},  # averaging starts at the fourth step
        {"": {}, "foreach": {"foreach": True}, "maximize": {"maximize": True}, "weight_decay": {"weight_decay": 0.1}},
    ),
    "Adafactor": (
        optim.Adafactor,
        {"lr": 0.01},
        {"": {}, "foreach": {"foreach": True}, "maximize": {"maximize": True}, "weight_decay": {"weight_decay": 0.1}},
    ),
}


def _table() -> dict[str, Make]:
    table: dict[str, Make] = {}
    for name, (kind, always, variants) in _KINDS.items():
        for variant, options in variants.items():
            table[f"{name} {variant}".strip()] = _one_group(kind, **{**always, **options})
    table["SGD two groups"] = _two_groups(optim.SGD, lr=0.05, momentum=0.9)
    table["Adam two groups"] = _two_groups(optim.Adam, lr=0.01)
    table["AdamW two groups"] = _two_groups(optim.AdamW, lr=0.01)
    table["AdamW two groups foreach"] = _two_groups(optim.AdamW, lr=0.01, foreach=True)
    table["AdamW two groups fused"] = _two_groups(optim.AdamW, lr=0.01, fused=True)
    table["RMSprop two groups"] = _two_groups(optim.RMSprop, lr=0.01)
    table["SGD tensor lr"] = _tensor_rate(optim.SGD, lr=0.05)
    table["AdamW tensor lr"] = _tensor_rate(optim.AdamW, lr=0.01)
    table["AdamW tensor lr fused"] = _tensor_rate(optim.AdamW, lr=0.01, fused=True)
    table["Muon"] = _matrices(lr=0.01)
    table["Muon nesterov off"] = _matrices(lr=0.01, nesterov=False)
    table["Muon match_rms_adamw"] = _matrices(lr=0.01, adjust_lr_fn="match_rms_adamw")
    return table


OPTIMIZERS: dict[str, Make] = _table()
"""Name and variant -> (parameters -> optimizer)."""
