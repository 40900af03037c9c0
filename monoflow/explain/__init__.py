"""What a person reads: plans."""

from __future__ import annotations

from monoflow.explain.plan import Plan

__all__ = ["Plan"]
