"""Shared by all tests: one thread (sums in one order, several test runs on one machine) and the same seed for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks, which are not installed

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
