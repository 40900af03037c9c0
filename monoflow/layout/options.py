"""What a rule allows for one call: the ways to lay out its tensors over one mesh dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from monoflow.errors import RuleError
from monoflow.layout.call import Call
from monoflow.layout.notation import ELLIPSIS, Rule, Term, parse
from monoflow.sbp import Partial, Sbp, Split, broadcast, partial_sum
from monoflow.schema import tensor_arguments

Kind = Literal["whole", "cut", "partial"]


@dataclass(frozen=True, slots=True)
class Option:
    """One way: an Sbp for each tensor argument and each tensor result of a group, flat.

    kind     whole: everything B; cut: a factor of `size` is split; partial: arguments hold partial sums and pass them on
    even     the factor's size must be a multiple of the number of its pieces
    filled   no piece may be empty
    offset   the local call must know where its piece starts
    """

    kind: Kind
    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    factor: str = ""
    size: int = 0
    even: bool = False
    filled: bool = False
    offset: bool = False

    def fits(self, parts: int) -> bool:
        """True where a cut in `parts` pieces is as the option demands; always for what cuts nothing."""
        if self.kind != "cut":
            return True
        if self.size <= 1 or (self.even and self.size % parts):
            return False
        return not self.filled or (parts - 1) * -(-self.size // parts) < self.size


@dataclass(frozen=True, slots=True)
class Group:
    """Arguments and results that are laid out together: all of an op's, or, for ops on lists, those of one index.

    `inputs` and `outputs` are places in the flat lists of the call's tensors; `kept_whole` are (input, dimension) pairs that the rule
    does not cut.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: tuple[Option, ...]
    kept_whole: frozenset[tuple[int, int]] = field(default_factory=frozenset)


def flat_tensors(value: Any) -> Iterator[Any]:
    """The tensors of a (nested) value in order; None and numbers are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat_tensors(item)


def whole_group(inputs: int, outputs: int) -> Group:
    """Everything on whole tensors."""
    return Group(tuple(range(inputs)), tuple(range(outputs)), (_whole(inputs, outputs),))


def _whole(inputs: int, outputs: int) -> Option:
    return Option("whole", (broadcast,) * inputs, (broadcast,) * outputs)


def groups_of(call: Call, line: str) -> tuple[Group, ...]:
    """The groups of a call under a rule. Raises RuleError where the line does not fit the call."""
    rule = parse(line)
    tensors = tensor_arguments(call.target)
    if len(rule.inputs) != len(tensors):
        raise RuleError(
            f"the rule {line!r} has {len(rule.inputs)} argument term(s), {call.target} has {len(tensors)}: {', '.join(tensors)}"
        )
    inputs = list(_bind_inputs(rule, call))
    outputs = list(_bind_outputs(rule, call))
    in_lists = {number for term, _, number, _ in inputs if term.is_list}
    out_lists = {number for term, _, number, _ in outputs if term.is_list}
    if in_lists and out_lists:
        return tuple(_each(rule, inputs, outputs))
    return (_group(rule, inputs, outputs),)


_Flat = tuple[Term, tuple[int, ...], int, tuple[int, int]]
"""A term, a shape, the term's number, (place in the flat list, index in the term's own list)."""


_Dims = list[list[tuple[str, ...]]]
"""For each tensor, the factors of each of its dimensions."""


def _bind_inputs(rule: Rule, call: Call) -> Iterator[_Flat]:
    place = 0
    for number, is_list, tensors in call.terms:
        term = rule.inputs[number]
        if is_list and not term.is_list:
            raise RuleError(f"argument {number} of {call.target} is a list: its term in {rule.text!r} must be in brackets")
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                yield term, tuple(tensor.shape), number, (place, index)
                place += 1


def _bind_outputs(rule: Rule, call: Call) -> Iterator[_Flat]:
    place = 0
    results = call.results
    if len(rule.outputs) != len(results):
        raise RuleError(f"the rule {rule.text!r} has {len(rule.outputs)} result terms, {call.target} has {len(results)} results")
    for number, (term, result) in enumerate(zip(rule.outputs, results, strict=True)):
        for index, tensor in enumerate(flat_tensors(result)):
            yield term, tuple(tensor.shape), number, (place, index)
            place += 1


def _each(rule: Rule, inputs: list[_Flat], outputs: list[_Flat]) -> Iterator[Group]:
    """One group for each index of the lists; arguments that are no lists must be whole."""
    count = max(index for term, _, _, (_, index) in inputs if term.is_list) + 1
    for index in range(count):
        yield _group(rule, [i for i in inputs if i[0].is_list and i[3][1] == index], [o for o in outputs if o[3][1] == index])
    single = tuple(place for term, _, _, (place, _) in inputs if not term.is_list)
    if single:
        yield Group(single, (), (_whole(len(single), 0),))


def _group(rule: Rule, inputs: list[_Flat], outputs: list[_Flat]) -> Group:
    in_dims = [_factors(rule, term, shape) for term, shape, _, _ in inputs]
    out_dims = [_factors(rule, term, shape) for term, shape, _, _ in outputs]
    sizes = _sizes(
        rule, [(d, i[1]) for d, i in zip(in_dims, inputs, strict=True)] + [(d, o[1]) for d, o in zip(out_dims, outputs, strict=True)]
    )
    options = [_whole(len(inputs), len(outputs))]
    cut: set[str] = set()
    for factor, size in sizes.items():
        if _can_be_cut(rule, factor, in_dims + out_dims):
            cut.add(factor)
            options.append(_cut(rule, factor, size, inputs, in_dims, outputs, out_dims))
    for arguments in rule.linear:
        if any(number in arguments for _, _, number, _ in inputs):
            layout = tuple(partial_sum if number in arguments else broadcast for _, _, number, _ in inputs)
            options.append(Option("partial", layout, (partial_sum,) * len(outputs)))
    kept = frozenset(
        (place, dim)
        for place, (dims, (_, shape, _, _)) in enumerate(zip(in_dims, inputs, strict=True))
        for dim, factors in enumerate(dims)
        if shape[dim] > 1 and not any(f in cut for f in factors[:1])
    )
    return Group(tuple(i[3][0] for i in inputs), tuple(o[3][0] for o in outputs), tuple(options), kept)


def _factors(rule: Rule, term: Term, shape: Sequence[int]) -> list[tuple[str, ...]]:
    """The factors of each dimension of a tensor; leading dimensions under `...` are named by their distance from the last of them."""
    dims = list(term.dims)
    if dims and dims[0] == (ELLIPSIS,):
        named = dims[1:]
        leading = len(shape) - len(named)
        if leading < 0:
            named, leading = named[-len(shape) :] if shape else [], 0  # a tensor broadcast over dimensions that it lacks
        return [(f"{ELLIPSIS}{leading - 1 - i}",) for i in range(leading)] + named
    if len(dims) != len(shape):
        raise RuleError(f"a term of {rule.text!r} has {len(dims)} dimension(s), its tensor has shape {tuple(shape)}")
    return dims


def _sizes(rule: Rule, tensors: list[tuple[list[tuple[str, ...]], tuple[int, ...]]]) -> dict[str, int]:
    """The size of each factor: of those that stand alone in a dimension first, then of the one that is missing in a merged dimension."""
    sizes: dict[str, int] = {}
    merged = []
    for dims, shape in tensors:
        for factors, size in zip(dims, shape, strict=True):
            if len(factors) == 1:
                sizes[factors[0]] = max(size, sizes.get(factors[0], size)) if size != 0 else 0
            elif factors:
                merged.append((factors, size))
    for factors, size in merged:
        unknown = [f for f in factors if f not in sizes]
        if len(unknown) == 1:
            rest = 1
            for f in factors:
                rest *= sizes.get(f, 1)
            sizes[unknown[0]] = size // rest if rest else 0
    return sizes


def _can_be_cut(rule: Rule, factor: str, tensors: list[list[tuple[str, ...]]]) -> bool:
    if factor in rule.whole or (factor.startswith(ELLIPSIS) and ELLIPSIS in rule.whole):
        return False
    return all(factors[0] == factor for dims in tensors for factors in dims if factor in factors)


def _cut(rule: Rule, factor: str, size: int, inputs: list[_Flat], in_dims: _Dims, results: list[_Flat], out_dims: _Dims) -> Option:
    even = any(len(factors) > 1 for dims in in_dims + out_dims for factors in dims if factor in factors)
    outputs: list[Sbp] = []
    for dims, (_, shape, _, _) in zip(out_dims, results, strict=True):
        dim = next((d for d, factors in enumerate(dims) if factor in factors), None)
        if dim is not None:
            outputs.append(Split(dim))
        else:  # an empty result holds nothing to add up
            outputs.append(broadcast if 0 in shape else Partial(rule.reductions.get(factor, "sum")))
    reduced = any(isinstance(o, Partial) for o in outputs)
    layouts: list[Sbp] = []
    for dims, (term, shape, _, _) in zip(in_dims, inputs, strict=True):
        dim = next((d for d, factors in enumerate(dims) if factor in factors and (shape[d] != 1 or size == 1)), None)
        if dim is not None:
            layouts.append(Split(dim))
        else:
            layouts.append(partial_sum if term.added and reduced else broadcast)
    mark = ELLIPSIS if factor.startswith(ELLIPSIS) else factor
    return Option("cut", tuple(layouts), tuple(outputs), factor, size, even, mark in rule.filled | rule.offset, mark in rule.offset)
