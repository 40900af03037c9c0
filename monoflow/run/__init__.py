"""Callable + state: binds a compiled graph to the user's tensors and runs it."""

from __future__ import annotations

from monoflow.run.executor import Executor
from monoflow.run.memory import keep_freed_memory

__all__ = ["Executor", "keep_freed_memory"]
