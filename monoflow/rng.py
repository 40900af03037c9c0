"""Reading and setting the CPU generator as ops of a graph; plain functions, so that any backend can call them."""

from __future__ import annotations

import torch


def get_rng_state() -> torch.Tensor:
    """The state of PyTorch's CPU generator, a uint8 vector."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Sets the state of PyTorch's CPU generator."""
    torch.default_generator.set_state(state)


get_rng_state.has_effect = True  # type: ignore[attr-defined]
set_rng_state.has_effect = True  # type: ignore[attr-defined]
