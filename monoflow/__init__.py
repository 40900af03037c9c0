"""monoflow: one training step, written for one device, as one static graph."""

from __future__ import annotations

from monoflow import errors, nn
from monoflow.capture import StepGraph
from monoflow.explain import Plan
from monoflow.source import Frame, OpInfo
from monoflow.step import Step, graph

__version__ = "0.1.0"

__all__ = ["Frame", "OpInfo", "Plan", "Step", "StepGraph", "errors", "graph", "nn"]
