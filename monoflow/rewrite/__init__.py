"""Graph -> graph: the user's passes now; small passes of our own, one a file."""

from __future__ import annotations

from monoflow.rewrite.passes import Pass, apply_passes

__all__ = ["Pass", "apply_passes"]
