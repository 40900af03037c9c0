"""Matrix products and what is made of them."""

from __future__ import annotations

from monoflow.layout.table.entry import Entry

RULES: dict[str, Entry] = {
    "mm": "m k, k n -> m n; linear 0 | 1",
    "bmm": "b m k, b k n -> b m n; linear 0 | 1",
    "addmm": "+... n, m k, k n -> m n; linear 0 1 | 0 2",
    "baddbmm": "+... n, b m k, b k n -> b m n; linear 0 1 | 0 2",
    "dot": "k, k -> .; linear 0 | 1",
    "mv": "m k, k -> m; linear 0 | 1",
}
