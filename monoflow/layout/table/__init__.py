"""The table of layout rules.

Op -> a line, or a function from a call to its line. Looked up here, written in the files beside, by kind of op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from monoflow._torch import OpOverload
from monoflow.layout.call import Call
from monoflow.layout.table.entry import Entry
from monoflow.layout.table.factories import RULES as FACTORIES
from monoflow.layout.table.indexing import RULES as INDEXING
from monoflow.layout.table.linear_algebra import RULES as LINEAR_ALGEBRA
from monoflow.layout.table.lists import RULES as LISTS
from monoflow.layout.table.lists import each
from monoflow.layout.table.neural import RULES as NEURAL
from monoflow.layout.table.pointwise import RULES as POINTWISE
from monoflow.layout.table.pointwise import pointwise
from monoflow.layout.table.reductions import RULES as REDUCTIONS
from monoflow.layout.table.views import RULES as VIEWS
from monoflow.schema import op_name

Rules: TypeAlias = dict[str, Entry]

TABLES: tuple[Rules, ...] = (POINTWISE, LINEAR_ALGEBRA, VIEWS, REDUCTIONS, INDEXING, FACTORIES, NEURAL, LISTS)
"""Each maps "mm" (every overload of aten.mm), "sum.dim_IntList" (one overload) or "namespace::name" (other libraries) to a rule."""


def _merge(tables: tuple[Rules, ...]) -> Rules:
    merged: Rules = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        if twice:
            raise AssertionError(f"two rules for {sorted(twice)}")
        merged.update(table)
    return merged


_RULES = _merge(TABLES)

registered: Rules = {}
"""What `mf.register_rule` has added, by the same names; grows for as long as the process runs."""


def has_own_rule(name: str) -> bool:
    """True for an op with an entry of its own, by its name as in the tables."""
    return name in _RULES or name in registered


def named_overloads() -> Iterator[OpOverload]:
    """The overloads of PyTorch's own ops that the tables name."""
    for key in _RULES:
        base, _, overload = key.partition(".")
        packet = getattr(torch.ops.aten, base, None) if "::" not in key else None
        for name in packet.overloads() if packet is not None else ():
            if not overload or name == overload:
                yield getattr(packet, name)


def find_entry(target: OpOverload) -> Entry | None:
    """The table's entry for an op: for its overload, else for its name, else by PyTorch's tag for elementwise ops."""
    base = op_name(target)
    for key in (f"{base}.{target._overloadname}", base):
        found = _RULES.get(key) or registered.get(key)
        if found is not None:
            return found
    if base.startswith(("_foreach_", "_fused_")):
        return each
    return pointwise if torch.Tag.pointwise in target.tags else None


def rule_line(call: Call) -> str | None:
    """The rule of a call as a line, or None where there is none."""
    entry = find_entry(call.target)
    return entry if entry is None or isinstance(entry, str) else entry(call)
