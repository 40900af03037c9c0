"""Where an op comes from: user frames, module path, phase. Part of the vocabulary every room shares."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import torch

Phase = Literal["forward", "backward", "update"]

MAX_FRAMES = 24
"""Frames kept per op, innermost first. Deeper stacks (recursive models) lose their outermost library frames."""


def _directory(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")


_OWN_DIRECTORY = _directory(os.path.dirname(__file__))
_LIBRARY_DIRECTORIES = tuple(
    dict.fromkeys(
        [_directory(os.path.dirname(torch.__file__))]
        + [_directory(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    )
)


@functools.lru_cache(maxsize=4096)
def _kind(filename: str) -> Literal["user", "library", "own"]:
    if filename.startswith("<frozen"):
        return "library"
    path = os.path.realpath(filename)
    if path.startswith(_OWN_DIRECTORY):
        return "own"
    in_library = path.startswith(_LIBRARY_DIRECTORIES) or f"{os.sep}site-packages{os.sep}" in path
    return "library" if in_library else "user"


@dataclass(frozen=True, slots=True)
class Frame:
    """One Python frame. `library` marks frames of installed packages, which are folded when shown."""

    file: str
    line: int
    function: str
    text: str
    library: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@functools.lru_cache(maxsize=65536)
def _frame(file: str, line: int, function: str, library: bool) -> Frame:
    return Frame(file, line, function, linecache.getline(file, line).strip(), library)


def code_frame(file: str, line: int, function: str) -> Frame:
    """A frame for a line that is known from a code object rather than from a running stack."""
    return _frame(file, line, function, _kind(file) == "library")


def stack(depth: int = 1, until: FrameType | None = None) -> tuple[Frame, ...]:
    """The Python stack of the caller, innermost first, without monoflow's own frames.

    `until` ends the walk (that frame is left out): the frame from which the user's step was called.
    """
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame is not until and len(frames) < MAX_FRAMES:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind != "own":
            frames.append(_frame(code.co_filename, frame.f_lineno, code.co_name, kind == "library"))
        frame = frame.f_back
    return tuple(frames)


def user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's own code, or None when there is none."""
    return next((frame for frame in frames if not frame.library), None)


def is_user_code(filename: str) -> bool:
    """True when `filename` is neither monoflow's, PyTorch's, the standard library's nor an installed package's."""
    return _kind(filename) == "user"


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """The forward op whose gradient a backward op computes."""

    name: str
    target: str
    source: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What every call node of a graph knows of itself (`node.meta["op"]`).

    source   the Python stack when the op ran, innermost first; library frames are marked, not dropped
    module   qualified name of the module that ran it ("blocks.3.attn"), "" outside any module
    phase    "forward", "backward" or "update" (clipping and optimizers)
    forward  for a backward op, the forward op it belongs to
    """

    source: tuple[Frame, ...]
    module: str
    phase: Phase
    forward: ForwardOp | None = None

    @property
    def user(self) -> Frame | None:
        """The user's line: for a backward op the line of its forward op, else the innermost user frame."""
        if self.forward is not None:
            found = user_frame(self.forward.source)
            if found is not None:
                return found
        return user_frame(self.source)

    def lines(self) -> Iterator[str]:
        """One header line, then the user's line(s), for printing over the op."""
        where = f" {self.module}" if self.module else ""
        yield f"[{self.phase}{where}]"
        if self.forward is not None:
            forward = user_frame(self.forward.source)
            if forward is not None:
                yield f"{forward}  {forward.text}   (gradient of {self.forward.name}: {self.forward.target})"
        here = user_frame(self.source)
        if here is not None:
            yield f"{here}  {here.text}"
        elif self.source:
            yield f"{self.source[0]}  {self.source[0].text}"


def format_frames(frames: tuple[Frame, ...]) -> str:
    """User frames outermost first, as Python prints them; runs of library frames folded into one line."""
    lines: list[str] = []
    folded: list[Frame] = []

    def flush() -> None:
        if folded:
            last = folded[-1]
            lines.append(f"  ... {len(folded)} library frame(s), last {os.path.basename(last.file)}:{last.line} in {last.function}")
            folded.clear()

    for frame in reversed(frames):
        if frame.library:
            folded.append(frame)
            continue
        flush()
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n    {frame.text}')
    flush()
    return "\n".join(lines)
