"""What capture hands on: the step's graph, where its inputs come from and where its outputs go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from monoflow._torch import FakeTensorMode, OpOverload, fake_mode_of, storage_id
from monoflow.source import OpInfo
from monoflow.state import Inventory

InputKind = Literal["argument", "parameter", "buffer", "optimizer", "gradient", "number", "constant"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Input:
    """Where the value of one placeholder comes from. Objects of the state are named, so that a graph can be bound to others.

    argument   user argument number `index` of the flattened call
    parameter, buffer, optimizer   the tensor `name` of the state, read and updated in place
    gradient   `.grad` of the parameter `parameter`, or of argument number `index` if that is None
    number     the number `name` of an optimizer, or argument number `index` if that is not negative
    constant   `value`, a tensor that the step refers to from outside (a closure, a literal)
    """

    name: str
    kind: InputKind
    index: int = -1
    parameter: str | None = None
    value: torch.Tensor | None = None


Store = Callable[[Any], None]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Write:
    """An output of the graph that is stored into the user's objects after a call.

    By `bind(inventory)(value)`, where `inventory` is what the state holds now; or, for the gradient of an argument tensor, as `.grad` of
    argument number `argument`.
    """

    name: str
    kind: Literal["gradient", "buffer", "optimizer", "number"]
    bind: Callable[[Inventory], Store] | None
    argument: int = -1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GradientRule:
    """What a graph supposes of a tensor's `.grad` on entry, and whether it leaves None behind.

    The tensor is the parameter of that name, or argument number `argument` of the flattened call if `parameter` is None.
    """

    parameter: str | None
    argument: int
    on_entry: Literal["any", "none", "tensor"]
    cleared: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Captured:
    """A whole step as one static graph over one device's tensors.

    graph      placeholders in the order of `inputs`; its output is the flat tuple of returned values, then written ones
    returned   rebuilds what the user's function returned from the graph's first outputs
    writes     what becomes of the other outputs, in order
    guards     graph over the same placeholders whose output is a tuple of bools, all True while the graph is valid;
               None when nothing needs checking
    """

    graph: StepGraph
    inputs: tuple[Input, ...]
    returned: Callable[[list[Any]], Any]
    returned_count: int
    writes: tuple[Write, ...]
    gradients: tuple[GradientRule, ...]
    guards: fx.GraphModule | None


class StepGraph(fx.GraphModule):
    """An `fx.GraphModule` that prints the user's line over each op. fx's own Python code is only written when somebody asks for it."""

    _written = False

    def recompile(self) -> Any:
        """Forgets the code of the graph as it was."""
        self._written = False

    def _write(self) -> None:
        if not self._written:
            self._written = True
            super().recompile()

    @property
    def code(self) -> str:
        """The graph as fx writes it in Python."""
        self._write()
        return super().code

    def forward(self, *args: Any) -> Any:
        """Runs the graph as fx would."""
        self._write()
        return type(self).forward(self, *args)  # fx has put the code there

    def print_readable(self, print_output: bool = True, **_: Any) -> str:  # type: ignore[override]
        """The graph as Python text; over each op its phase, module and the user's file:line and code."""
        text = "\n".join(self._readable_lines())
        if print_output:
            print(text)
        return text

    def _readable_lines(self) -> list[str]:
        lines = ["def step(" + ", ".join(n.name for n in self.graph.nodes if n.op == "placeholder") + "):"]
        previous: OpInfo | None = None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                lines.append(f"    # {node.name}: {_described(node)}")
            elif node.op == "output":
                lines.append(f"    return {node.args[0]}")
            else:
                info: OpInfo | None = node.meta.get("op")
                if info is not None and info != previous:
                    lines.append("")
                    lines.extend(f"    # {line}" for line in info.lines())
                previous = info
                lines.append(f"    {node.name} = {format_call(node)}  # {_described(node)}")
        return lines


def _described(node: fx.Node) -> str:
    """The value of a node, and what a later room has noted of it (how it lies over ranks)."""
    return " ".join(filter(None, (describe_value(node.meta.get("val")), node.meta.get(NOTE))))


NOTE = "note"
"""Key in a node's meta of a text that is printed beside its value."""


def describe_value(value: Any) -> str:
    """`f32[8, 16]`, `number`, or a list of them."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("uint", "u")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe_value, value)) + ")"
    return "number" if isinstance(value, int | float) else "-"


def target_name(target: Any) -> str:
    """`aten.mm.default` for ATen ops, the plain name for Python functions."""
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


def format_call(node: fx.Node) -> str:
    """The call of a node as text: `aten.mm.default(x, weight)`."""
    args = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
    return f"{target_name(node.target)}({', '.join(args)})"


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an op writes into, by its schema."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written.extend(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, fx.Node))
    return written


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The metadata of the tensors that a node is the value of: one, several, or none."""
    value = node.meta.get("val")
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, torch.Tensor):
            yield item


def memory_of(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """Identities of the storages in which the values of the nodes lie."""
    return (storage_id(tensor) for node in nodes for tensor in tensors_of(node))


def overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True unless two tensors lie in different memory, or in stretches of the same memory that do not meet."""
    if storage_id(left) != storage_id(right):
        return False
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return True
    (a, b), (c, d) = _stretch(left), _stretch(right)
    return a < d and c < b


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of the storage from the first to behind the last element."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    last = first + sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def only_looks(user: fx.Node, value: fx.Node) -> bool:
    """True for an op that makes a view of a value and reads nothing of it."""
    if user.op != "call_function" or not isinstance(value.meta.get("val"), torch.Tensor) or written_nodes(user):
        return False
    memory = storage_id(value.meta["val"])
    results = list(tensors_of(user))
    return bool(results) and all(storage_id(r) == memory for r in results)


def is_wait(target: object) -> bool:
    """True for the op that waits for a collective."""
    return isinstance(target, OpOverload) and target._schema.name == "_c10d_functional::wait_tensor"


def is_collective(target: object) -> bool:
    """True for an op that starts a collective, which then runs in the background."""
    return isinstance(target, OpOverload) and target.namespace == "_c10d_functional" and not is_wait(target)


def done_at(user: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """Where a user is done with its arguments: at its own place; a collective, which runs in the background, at the wait for it."""
    return max(position[n] for n in (user, *user.users)) if is_collective(user.target) else position[user]


def phase_of(node: fx.Node) -> str:
    """ "forward", "backward" or "update"; "" for what is not an op, or does not know."""
    info = node.meta.get("op")
    return info.phase if node.op == "call_function" and isinstance(info, OpInfo) else ""


def is_effect(node: fx.Node) -> bool:
    """True for an op that must run although nobody uses its result: it writes, or it draws random numbers."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, OpOverload):
        return bool(getattr(node.target, "has_effect", False))
    return node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags


def describe_node(node: fx.Node) -> str:
    """The node and the user's line, for errors."""
    info = node.meta.get("op")
    where = f" ({info.user})" if isinstance(info, OpInfo) and info.user is not None else ""
    return f"{node.name} = {format_call(node)}{where}"


def fake_mode_of_graph(graph: fx.Graph) -> FakeTensorMode:
    """The mode of the fake tensors of a graph; a new one for a graph without any."""
    values = (v for n in graph.nodes for v in _leaves(n.meta.get("val")))
    return fake_mode_of(list(values)) or FakeTensorMode()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nobody needs after it: itself, if its result is not used; what a collective took, after the wait."""
    frees: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        needed = [*node.all_input_nodes, node] if node.op == "call_function" else node.all_input_nodes
        if is_wait(node.target):
            needed += [value for started in node.all_input_nodes if is_collective(started.target) for value in started.all_input_nodes]
        for value in dict.fromkeys(needed):
            if value not in seen:
                seen.add(value)
                frees.setdefault(node, []).append(value)
    return frees
