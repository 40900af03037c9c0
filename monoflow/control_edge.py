"""`monoflow::after`: a control edge of a rank's graph.

`after(x, [y])` is `x`, and comes after `y`: what is made of it cannot start earlier. Backends run it as nothing, and keep the order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, library

_library = library.Library("monoflow", "FRAGMENT")
_library.define("after(Tensor(a) self, Tensor[] others) -> Tensor(a)")
_library.impl("after", lambda x, others: x.view_as(x), "CompositeExplicitAutograd")

after: Any = torch.ops.monoflow.after.default


def insert_after(value: fx.Node, others: list[fx.Node], user: fx.Node) -> None:
    """`user` takes `value` after the others only."""
    with user.graph.inserting_before(user):
        edge = user.graph.call_function(after, (value, others))
    edge.meta.update({"val": value.meta["val"], "op": user.meta["op"]})
    user.replace_input_with(value, edge)
