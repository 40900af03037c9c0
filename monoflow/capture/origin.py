"""Where an op comes from: user frames, module path, phase, and the forward op that a gradient belongs to."""

from __future__ import annotations

import operator
import os
from types import FrameType
from typing import Any

import torch
from torch import fx

from monoflow._torch import current_autograd_node, next_sequence_number
from monoflow.capture.graph import target_name
from monoflow.errors import CaptureError
from monoflow.source import ForwardOp, Frame, OpInfo, Phase, stack

_TORCH = os.path.dirname(torch.__file__)
_AUTOGRAD_FILES = (os.path.join(_TORCH, "autograd", "__init__.py"), os.path.join(_TORCH, "autograd", "graph.py"))
_CLIPPING = os.path.join(_TORCH, "nn", "utils", "clip_grad.py")


class Origins:
    """Makes the `OpInfo` of each op while a step is captured, and errors that say where the step is.

    boundary         the frame that called the user's step: where its stacks end
    module_stack     paths of the modules that are running, outermost first
    optimizer_depth  how many `optimizer.step()` are running
    refused          the first error made, also if the step has caught it
    """

    def __init__(self) -> None:
        self.boundary: FrameType | None = None
        self.module_stack: list[str] = []
        self.optimizer_depth = 0
        self.refused: CaptureError | None = None
        self._forward_ops: dict[int, fx.Node] = {}
        self._last_sequence = next_sequence_number() - 1
        self._last_backward: ForwardOp | None = None
        self._gradients: set[fx.Node] = set()

    @property
    def module(self) -> str:
        """The path of the module that is running; "" outside of any."""
        return self.module_stack[-1] if self.module_stack else ""

    def stack(self) -> tuple[Frame, ...]:
        """The stack of the step as it is now."""
        return stack(until=self.boundary)

    def error(self, reason: str, *, op: str = "", fix: str = "") -> CaptureError:
        """The error to raise for something that cannot be captured. The capture fails even if the step catches it."""
        error = CaptureError(reason, op=op, fix=fix, module=self.module, frames=self.stack())
        self.refused = self.refused or error
        return error

    def info(self, inputs: list[fx.Node]) -> OpInfo:
        """The origin of an op that runs now on these inputs."""
        frames = self.stack()
        running: Any = current_autograd_node()
        if running is not None:
            return self._in_backward(frames, self._forward_ops.get(running._sequence_nr()))
        if frames and frames[0].file in _AUTOGRAD_FILES:  # what starts a backward pass: the gradient of the loss by itself
            return self._in_backward(frames, next((n for n in inputs if "op" in n.meta), None))
        phase: Phase = "update" if self._is_update(frames, inputs) else "forward"
        return OpInfo(frames, self.module, phase)

    def _in_backward(self, frames: tuple[Frame, ...], forward: fx.Node | None) -> OpInfo:
        """An op without a forward op of its own (gradients are added up) belongs to that of the op before."""
        module = self.module
        if forward is not None:
            module = module or forward.meta["op"].module
            self._last_backward = _forward_op(forward)
        return OpInfo(frames, module, "backward", self._last_backward)

    def _is_update(self, frames: tuple[Frame, ...], inputs: list[fx.Node]) -> bool:
        """Optimizers, clipping, and whatever is computed from gradients."""
        if self.optimizer_depth or _runs_in(frames, _CLIPPING):
            return True
        return any(n in self._gradients or ("op" in n.meta and n.meta["op"].phase == "update") for n in inputs)

    def mark_gradient(self, node: fx.Node) -> None:
        """Ops on a parameter's `.grad` outside the autograd engine belong to the update."""
        self._gradients.add(node)

    def recorded(self, node: fx.Node) -> None:
        """Remembers that the autograd nodes created since the last op are those of `node` (autograd counts them)."""
        latest = next_sequence_number() - 1
        for number in range(self._last_sequence + 1, latest + 1):
            self._forward_ops[number] = node
        self._last_sequence = max(latest, self._last_sequence)


def _forward_op(node: fx.Node) -> ForwardOp:
    if node.target is operator.getitem:  # an output of the op
        node = node.all_input_nodes[0]
    return ForwardOp(node.name, target_name(node.target), node.meta["op"].source)


def _runs_in(frames: tuple[Frame, ...], file: str) -> bool:
    """True when `file` is among the library frames under the innermost user frame."""
    for frame in frames:
        if not frame.installed:
            return False
        if frame.file == file:
            return True
    return False
