"""Each backend's fastest way to do a collective, as `python -m benchmarks.collectives` measures it.

gloo on one machine (2 ranks of one thread, 64 MB): a reduce-scatter takes three to four times as long as an all-to-all and a sum of what
has arrived.
"""

from __future__ import annotations

from typing import Literal

ReduceScatter = Literal["reduce-scatter", "all-to-all and sum"]

REDUCE_SCATTER: dict[str, ReduceScatter] = {"cpu": "all-to-all and sum", "cuda": "reduce-scatter"}
"""By device type."""
