"""Python step -> graph: the whole step run once on fake tensors, every op recorded with its source."""

from __future__ import annotations

from monoflow.capture.capture import capture, is_capturing
from monoflow.capture.graph import Captured, GradientRule, Input, StepGraph, Write
from monoflow.capture.outer import OuterValues
from monoflow.capture.verify import verify_graph

__all__ = ["Captured", "GradientRule", "Input", "OuterValues", "StepGraph", "Write", "capture", "is_capturing", "verify_graph"]
