"""Finds the line of the user's code at which something happens that is only noticed later: a change outside of the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from monoflow.capture.effects import Change
from monoflow.capture.origin import Origins
from monoflow.source import Frame, is_user_code, stack_of


class LineTracer:
    """Traces the user's lines, and notes where the program was when `look()` first had something to tell.

    `found` is what it told, the stack, innermost frame first, and the module that was running; None if it never told anything.
    """

    def __init__(self, origins: Origins, look: Callable[[], Change | None]) -> None:
        self.found: tuple[Change, tuple[Frame, ...], str] | None = None
        self._origins = origins
        self._tell = look
        self._last: tuple[tuple[Frame, ...], str] = ((), "")

    def __enter__(self) -> LineTracer:
        self._previous = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)
        self._look()

    def _look(self) -> None:
        told = self._tell() if self.found is None else None
        if told is not None:
            self.found = (told, *self._last)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.found is not None or not is_user_code(frame.f_code.co_filename):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._look()
        at = frame.f_back if event == "return" else frame
        if self.found is None and at is not None:
            self._last = (stack_of(at, self._origins.boundary), self._origins.module)
        return self._line
