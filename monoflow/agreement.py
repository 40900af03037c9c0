"""What the ranks of a step tell each other before they run, so that none waits in a collective that the others do not have."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from monoflow.errors import RankError
from monoflow.placement import Placement
from monoflow.world import start_processes


class Agreement:
    """The ranks of a placement, over gloo, whatever device they compute on. Making one is collective over all ranks of the job."""

    def __init__(self, placement: Placement) -> None:
        start_processes(placement.device_type)
        everyone = sorted(placement.ranks) == list(range(dist.get_world_size()))
        shared = everyone and placement.device_type == "cpu"
        self._group = dist.group.WORLD if shared else dist.new_group(sorted(placement.ranks), backend="gloo")
        self._order = sorted(placement.ranks)

    def exchange(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """What each rank gives, in the order of rank numbers: a few 64-bit numbers, in some hundred microseconds."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = torch.empty(len(self._order) * len(numbers), dtype=torch.int64)
        dist.all_gather_single(found, mine, group=self._group)
        return tuple(map(tuple, found.view(len(self._order), len(numbers)).tolist()))

    def exchange_objects(self, value: Any) -> list[Any]:
        """What each rank gives, in the order of rank numbers: any Python object that can be pickled."""
        found: list[Any] = [None] * len(self._order)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites a CPU tensor with that of the first rank."""
        dist.broadcast(tensor, self._order[0], group=self._group)

    @contextlib.contextmanager
    def first_generator(self) -> Iterator[None]:
        """Inside, every rank draws from the first rank's generator (PyTorch's, for CPU tensors); after, the others go on with their own."""
        own = torch.get_rng_state()
        shared = own.clone()
        self.broadcast(shared)
        torch.set_rng_state(shared)
        try:
            yield
        finally:
            if dist.get_rank() != self._order[0] and not torch.equal(own, shared):
                torch.set_rng_state(own)

    def check_equal(self, what: str, text: str) -> None:
        """Raises RankError on every rank, with the first lines that differ, unless all ranks give the same text."""
        mark = fingerprint64(text)
        if len(set(self.exchange([mark]))) == 1:
            return
        texts = self.exchange_objects(text)
        other = next(i for i, t in enumerate(texts) if t != texts[0])
        one, two = self._order[0], self._order[other]
        raise RankError(f"{what} differs between ranks {one} and {two}:\n{difference(texts[0], texts[other], one, two)}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done on every rank or on none: where it fails on one, an error is raised on all."""
        try:
            yield
        except Exception as exc:
            self.all_or_none(exc)
            raise
        self.all_or_none(None)

    def all_or_none(self, error: BaseException | None) -> None:
        """Every rank says whether it has failed; if one has, all raise: it its own error, the others a RankError that quotes it."""
        if not any(failed for (failed,) in self.exchange([error is not None])):
            return
        texts = self.exchange_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in zip(self._order, texts, strict=True) if text is not None]
        raise RankError("\n".join(f"rank {rank} failed: {text}" for rank, text in failed))


def fingerprint64(text: str | bytes) -> int:
    """64 bits of a text, equal in every process."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def difference(first: str, second: str, first_rank: int, second_rank: int, lines: int = 12) -> str:
    """The first lines in which two texts differ."""
    found = difflib.unified_diff(first.splitlines(), second.splitlines(), f"rank {first_rank}", f"rank {second_rank}", lineterm="", n=0)
    return "\n".join(line for _, line in zip(range(lines), found, strict=False))


def stable_text(key: Hashable) -> str:
    """A key as text without addresses of objects, so that it is equal in every process."""
    if isinstance(key, tuple | list):
        return "(" + ", ".join(map(stable_text, key)) + ")"
    text = str(key) if isinstance(key, str | int | float | bool | type(None) | torch.dtype | torch.device) else None
    if text is not None:
        return text
    if isinstance(key, type):
        return key.__qualname__
    held = getattr(key, "value", key)
    return type(held).__qualname__
