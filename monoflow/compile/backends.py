"""The backends by name, and what "auto" means."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
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


def _aten(graph: fx.Graph, report: Report) -> Executable:
    graph = simplify(graph)
    cluster(graph)
    reuse_memory(graph)
    return compile_program(graph, Bindings())


def _inductor(graph: fx.Graph, report: Report) -> Executable:
    from monoflow.compile.inductor import compile_inductor  # Inductor takes a second to import; aten never needs it

    graph = simplify(graph)
    fuse_optimizers(graph)
    fuse_clipping(graph)
    graph.eliminate_dead_code(is_effect)
    cluster(graph)
    return compile_inductor(graph, report)


BACKENDS: dict[str, Callable[[fx.Graph, Report], Executable]] = {"aten": _aten, "inductor": _inductor}


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
    return BACKENDS[choose_backend(backend)](graph, report)


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
