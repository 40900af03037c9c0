"""What is laid down before deduction: the layouts of a step's inputs and of the outputs that go back into the user's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from monoflow.capture.graph import Input, InputKind, Write
from monoflow.errors import LayoutError
from monoflow.layout.values import whole_layout
from monoflow.placement import Placement
from monoflow.sbp import Layout, LayoutLike, layout


@dataclass(frozen=True, slots=True)
class Pins:
    """Layouts by name.

    Of parameters and buffers; of optimizer state, by "optimizer.<group>.<parameter>.<entry>"; of arguments, by number.
    """

    state: Mapping[str, Layout]
    arguments: Mapping[int, Layout]


def match_layouts(patterns: Mapping[str, LayoutLike], shapes: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Layout]:
    """The layout of each name that a pattern fits (shell wildcards, as in fnmatch); the last pattern that fits wins.

    Raises: LayoutError for a pattern that fits no name, SbpError for a layout that does not fit the mesh or the shape.
    """
    found: dict[str, Layout] = {}
    for pattern, given in patterns.items():
        names = [name for name in shapes if fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(f"layout pattern {pattern!r} fits no parameter or buffer. There are: {_some(shapes)}")
        for name in names:
            found[name] = layout(given, placement.ndim, len(shapes[name]))
    return found


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f", ... ({len(listed)} in all)" if len(listed) > 8 else "")


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
