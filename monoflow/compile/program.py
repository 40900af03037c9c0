"""An fx graph as straight-line Python: one line per op, every value freed after its last use.

Both backends run such a program; with "inductor" some of its lines are calls of compiled regions.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
from collections.abc import Callable
from typing import Any

from torch import fx

from monoflow.capture.graph import last_uses
from monoflow.compile.bindings import Bindings
from monoflow.source import OpInfo

Executable = Callable[[list[Any]], list[Any]]
"""Takes the placeholders' values as a list, which it empties; returns the flat outputs."""

_serial = itertools.count()


def compile_program(graph: fx.Graph, bindings: Bindings, name: str = "step") -> Executable:
    """Compiles the graph with Python's own compiler. Cost: tens of microseconds per op."""
    writer = _Writer(bindings)
    source = writer.program(graph, name)
    filename = f"<monoflow {name} {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), writer.namespace)
    program: Executable = writer.namespace[name]
    return program


class _Writer:
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.namespace: dict[str, Any] = {}
        self.names: dict[int, str] = {}

    def program(self, graph: fx.Graph, name: str) -> str:
        frees = last_uses(graph.nodes)
        placeholders = graph.find_nodes(op="placeholder")
        lines = [f"def {name}(values):"]
        if placeholders:
            lines.append("    (" + ", ".join(map(_variable, placeholders)) + ",) = values")
        lines.append("    values.clear()")
        for node in graph.nodes:
            if node.op == "call_function":
                freed = frees.get(node, [])
                free = f"; del {', '.join(map(_variable, freed))}" if freed else ""
                lines.append(f"    {_variable(node)} = {self._call(node)}{free}{_comment(node)}")
            elif node.op == "output":
                lines.append(f"    return [{', '.join(map(self._argument, node.args[0]))}]")
        return "\n".join(lines) + "\n"

    def _call(self, node: fx.Node) -> str:
        infix = self.bindings.infix(node)
        args = [self._argument(a) for a in node.args]
        if infix is not None:
            return infix.format(*args)
        arguments = args + [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{self._global(self.bindings.function(node), 'f')}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return _variable(value)
        if isinstance(value, tuple):
            return "(" + "".join(self._argument(v) + ", " for v in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._argument(v) for v in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in value.items()) + "}"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._global(value, "c")

    def _global(self, value: Any, prefix: str) -> str:
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"_{prefix}{len(self.names)}"
            self.namespace[name] = value
        return name


def _variable(node: fx.Node) -> str:
    return f"{node.name}_" if keyword.iskeyword(node.name) or node.name == "values" else node.name


def _comment(node: fx.Node) -> str:
    info = node.meta.get("op")
    user = info.user if isinstance(info, OpInfo) else None
    return "" if user is None else f"  # {user}"
