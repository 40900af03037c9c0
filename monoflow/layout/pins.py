"""What is laid down before deduction: the layouts of a step's inputs and of the outputs that go back into the user's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monoflow.capture.graph import Input, InputKind, Write
from monoflow.layout.values import whole_layout
from monoflow.sbp import Layout


@dataclass(frozen=True, slots=True)
class Pins:
    """Layouts by name.

    Of parameters and buffers; of optimizer state, by "optimizer.<group>.<parameter>.<entry>"; of arguments, by number.
    """

    state: Mapping[str, Layout]
    arguments: Mapping[int, Layout]


def input_layout(source: Input, shape: tuple[int, ...], pins: Pins, shapes: Mapping[str, tuple[int, ...]], mesh_dims: int) -> Layout:
    """The layout of one placeholder. State of an optimizer lies like its parameter if it has its shape; what is not pinned is B."""
    if source.kind == "argument" or (source.kind == "gradient" and source.parameter is None):
        return pins.arguments.get(source.index, whole_layout(mesh_dims))
    if source.kind == "gradient":
        return pins.state.get(source.parameter or "", whole_layout(mesh_dims))
    if source.kind == "optimizer":
        owner = owner_of(source.name, shapes)
        if source.name not in pins.state and owner is not None and shapes[owner] == shape:
            return pins.state.get(owner, whole_layout(mesh_dims))
    return pins.state.get(source.name, whole_layout(mesh_dims))


def owner_of(name: str, parameters: Iterable[str]) -> str | None:
    """The parameter that an entry of optimizer state belongs to: "optimizer.0.fc1.weight.exp_avg" belongs to "fc1.weight"."""
    middle = name.split(".", 2)[-1]
    return max((p for p in parameters if middle.startswith(f"{p}.")), key=len, default=None)


def output_layout(write: Write, shape: tuple[int, ...], pins: Pins, shapes: Mapping[str, tuple[int, ...]], mesh_dims: int) -> Layout:
    """The layout in which a written value is stored: that of the gradient's parameter, of the buffer or of the state that it replaces."""
    if write.kind == "gradient":
        parameter = None if write.argument >= 0 else write.name.removesuffix(".grad")
        return input_layout(Input(write.name, "gradient", write.argument, parameter), shape, pins, shapes, mesh_dims)
    kind: InputKind = "buffer" if write.kind == "buffer" else "optimizer"
    return input_layout(Input(write.name, kind), shape, pins, shapes, mesh_dims)
