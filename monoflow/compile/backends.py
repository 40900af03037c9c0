"""The backends by name, and what "auto" means."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from monoflow.capture.graph import is_effect
from monoflow.compile.bindings import Bindings
from monoflow.compile.cluster import cluster
from monoflow.compile.fuse import fuse_clipping, fuse_optimizers
from monoflow.compile.program import Executable, compile_program
from monoflow.compile.reuse import reuse_memory
from monoflow.compile.simplify import simplify
from monoflow.errors import StepError
from monoflow.progress import Report


@dataclass(frozen=True, slots=True)
class Backend:
    """`prepare` gives a graph as it will run, `compile` makes a program of that, which it may change."""

    prepare: Callable[[fx.Graph], fx.Graph]
    compile: Callable[[fx.Graph, Report], Executable]


def _prepare_aten(graph: fx.Graph) -> fx.Graph:
    graph = simplify(graph)
    cluster(graph)
    reuse_memory(graph)
    return graph


def _compile_aten(graph: fx.Graph, report: Report) -> Executable:
    return compile_program(graph, Bindings())


def _prepare_inductor(graph: fx.Graph) -> fx.Graph:
    graph = simplify(graph)
    fuse_optimizers(graph)
    fuse_clipping(graph)
    graph.eliminate_dead_code(is_effect)
    cluster(graph)
    return graph


def _compile_inductor(graph: fx.Graph, report: Report) -> Executable:
    from monoflow.compile.inductor import compile_inductor  # Inductor takes a second to import; aten never needs it

    return compile_inductor(graph, report)


BACKENDS = {"aten": Backend(_prepare_aten, _compile_aten), "inductor": Backend(_prepare_inductor, _compile_inductor)}


def choose_backend(name: str) -> str:
    """ "auto" is "inductor" where C++ can be built, else "aten". Raises StepError for an unknown name."""
    if name == "auto":
        return "inductor" if _can_build_cpp() else "aten"
    if name not in BACKENDS:
        raise StepError(f"unknown backend {name!r}: choose 'auto', {', '.join(map(repr, BACKENDS))}")
    return name


def _can_build_cpp() -> bool:
    """True where there is a C++ compiler, and Python's headers, which Inductor's kernels include."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def compile_graph(graph: fx.Graph, backend: str, report: Report) -> Executable:
    """Compiles a one-device graph. The graph itself is not changed."""
    chosen = BACKENDS[choose_backend(backend)]
    return chosen.compile(chosen.prepare(graph), report)


def prepared_graph(graph: fx.Graph, backend: str) -> fx.Graph:
    """The graph as a backend runs it; the graph itself is not changed."""
    return BACKENDS[choose_backend(backend)].prepare(graph)


def compile_guards(guards: fx.GraphModule | None) -> Executable | None:
    """The guards as a program over those placeholders that they use; its outputs are bools."""
    if guards is None:
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(guards.graph, {}))
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    return compile_program(graph, Bindings(), "guards")
