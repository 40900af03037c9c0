"""Reading and setting the CPU generator, and drawing pieces, as ops of a graph; plain callables, so that any backend can run them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from monoflow._torch import OpOverload

Random: TypeAlias = Literal["exact", "fast"]
"""Whether cut random values are those of one device, or drawn piece by piece."""


def get_rng_state() -> torch.Tensor:
    """The state of PyTorch's CPU generator, a uint8 vector."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Sets the state of PyTorch's CPU generator."""
    torch.default_generator.set_state(state)


class DrawPiece:
    """A random op on one piece of a tensor, with a stream of random numbers of the piece's own.

    `number` says which piece it is: equal on ranks that hold the same one. PyTorch's generator, alike on all ranks, gives the seed of all
    streams and advances by that one number, whatever the pieces.
    """

    has_effect = True
    draws = True

    def __init__(self, target: OpOverload, number: int) -> None:
        self.target, self.number = target, number
        self.__name__ = f"draw_piece_{target._schema.name.split('::')[-1]}"
        self.__qualname__ = f"{self.__name__}.{number}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**62, ()))
        after = get_rng_state()
        try:
            torch.default_generator.manual_seed(seed + self.number)
            return self.target(*args, **kwargs)
        finally:
            set_rng_state(after)


get_rng_state.has_effect = True  # type: ignore[attr-defined]
set_rng_state.has_effect = True  # type: ignore[attr-defined]
