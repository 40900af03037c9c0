"""One device's graph -> callable. `BACKENDS` is the table of ways."""

from __future__ import annotations

from monoflow.compile.backends import BACKENDS, choose_backend, compile_graph, compile_guards, prepared_graph
from monoflow.compile.program import Executable, compile_program

__all__ = ["BACKENDS", "Executable", "choose_backend", "compile_graph", "compile_guards", "compile_program", "prepared_graph"]
