"""Callable + state: binds a compiled graph to the user's tensors and runs it."""

from __future__ import annotations

from monoflow.run.executor import Executor

__all__ = ["Executor"]
