"""Every error a user can meet. Each says where (the user's line), what, why, and what to do."""

from __future__ import annotations

from monoflow.source import Frame, format_frames, user_frame


class MonoflowError(Exception):
    """Base of all errors raised by monoflow."""


class CaptureError(MonoflowError):
    """The step cannot become a graph. Raised before anything is changed.

    Attributes: `reason` (why), `fix` (what to write instead), `op` (the op or call), `module` (path of the module
    that was running, "" for none), `frames` (the stack, innermost first) and `frame` (the user's line, or None).
    """

    def __init__(
        self,
        reason: str,
        *,
        fix: str = "",
        op: str = "",
        module: str = "",
        frames: tuple[Frame, ...] = (),
    ) -> None:
        self.reason = reason
        self.fix = fix
        self.op = op
        self.module = module
        self.frames = frames
        self.frame = user_frame(frames)
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.reason if self.frame is None else f"{self.frame}: {self.reason}"]
        if self.frames:
            parts.append(f"where:\n{format_frames(self.frames)}")
        if self.op:
            parts.append(f"op: {self.op}")
        if self.module:
            parts.append(f"module: {self.module}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)


class GraphError(MonoflowError):
    """A graph breaks the written rules of what a valid graph is; names the pass after which it was found."""


class CompileError(MonoflowError):
    """A backend could not compile a graph or one of its regions."""


class StepError(MonoflowError):
    """Wrong use of `mf.graph` or `mf.nn.Graph`: arguments, options, or calls out of order."""


class PlacementError(MonoflowError):
    """A placement that cannot be: ranks that do not exist or are named twice, an unknown or another device type."""


class SbpError(MonoflowError):
    """An SBP that does not fit: a dimension that is not there, too few or too many for the mesh, a piece of the wrong shape or dtype."""


class RuleError(MonoflowError):
    """A layout rule that cannot be read, or does not fit the op it is for."""


class LayoutError(MonoflowError):
    """A graph cannot be laid out as its pins demand. The text names the user's line."""


class RankError(MonoflowError):
    """The ranks do not agree on the step, its arguments, or the state they start from.

    Raised on every rank; says what differs on which.
    """


class LayoutWarning(UserWarning):
    """An op has no layout rule and runs on whole tensors; the text names the op and the user's line."""


class CompileWarning(UserWarning):
    """With backend "auto", Inductor could not compile a graph, and "aten" runs it; the text says which lines."""


class RecompileWarning(UserWarning):
    """A step was compiled for the fourth time or more; the text says what changed between the calls."""
