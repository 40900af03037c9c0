"""Rules for ops of other libraries."""

from __future__ import annotations

import torch

from monoflow._torch import OpOverload
from monoflow.errors import RuleError
from monoflow.layout.notation import parse
from monoflow.layout.table import has_own_rule, registered
from monoflow.layout.table.entry import Entry
from monoflow.schema import tensor_arguments


def register_rule(op: str, rule: Entry) -> None:
    """Gives a custom op a layout rule, for every step of this process that is made from here on (as custom ops themselves are registered).

    Args:
        op: `"my_library::my_op"` for all overloads, `"my_library::my_op.overload"` for one.
        rule: a line such as `"b n, b n -> b"` (docs/sbp.md has the notation), or a function from a `Call` to the line of that call; None
            from it means that this call runs whole.

    Raises: RuleError for a line that cannot be read or does not have a term for each tensor of the op, for a name without `::`, and for an
        op that has a rule.
    """
    if "::" not in op:
        raise RuleError(f"mf.register_rule takes the full name of an op, such as 'my_library::my_op', got {op!r}")
    name = op.removeprefix("aten::")
    if has_own_rule(name):
        raise RuleError(f"{op} has a layout rule")
    if isinstance(rule, str):
        parsed = parse(rule)
        for target in _overloads(op):
            terms, tensors = len(parsed.inputs), len(tensor_arguments(target))
            results = len(target._schema.returns)
            if (terms, len(parsed.outputs)) != (tensors, results):
                raise RuleError(
                    f"the rule {rule!r} has {terms} argument and {len(parsed.outputs)} result term(s), "
                    f"{target} has {tensors} tensor argument(s) and {results} result(s)"
                )
    registered[name] = rule


def _overloads(op: str) -> list[OpOverload]:
    """The op's overloads as far as they are known now: a rule may be registered before its op."""
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return []
    return [getattr(packet, o) for o in packet.overloads() if not overload or o == overload]
