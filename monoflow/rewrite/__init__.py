"""Graph -> graph: the user's passes, and small ones of our own, one a file."""

from __future__ import annotations

from monoflow.rewrite.on_layout import OnLayout, apply_layout_passes, on_layout
from monoflow.rewrite.passes import Pass, apply_passes
from monoflow.rewrite.zero import Zero, zero_passes

__all__ = ["OnLayout", "Pass", "Zero", "apply_layout_passes", "apply_passes", "on_layout", "zero_passes"]
