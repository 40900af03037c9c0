"""The notation of layout rules: one line says how an op's tensors may be cut.

    "m k, k n -> m n; linear 0 | 1"        mm: split m, or n, or k (both inputs cut, the output a partial sum)

A line has a *term* for each tensor argument of the op in its schema's order (optional ones too; an absent argument's term is
skipped), `->`, and a term for each tensor result. A term names one *factor* for each dimension. Equal names are cut together;
what has no factor is held whole.

    m k          a tensor of two dimensions                     .        a tensor of no dimension
    (h d)        one dimension of h times d, h outermost        1        a dimension that is never cut (size one, or whatever)
    ... m        any number of leading dimensions, the last of them lined up over all terms; absent or of size one where a term is broadcast
    [a b]        a list of tensors, each of them `a b`
    +m n         an argument that is added: when the op sums over a factor that is cut, each rank must hold a term of it (P)

Marks on a factor: `k!` must stay whole (so may `...!`); `k@` may be cut, no piece empty, but each rank needs to know where its
piece starts (lower/pieces.py rewrites the call); `k+` no piece may be empty. A factor that results do not have is reduced: by a
sum, unless said otherwise.

After `;`, in any order: `max k`, `min k`, `prod k`, `any k`, `all k` name the reduction of a factor; `linear 0 | 1` says which arguments
may hold partial sums (counted over the terms): those joined by spaces only all at once, the alternatives between `|` one at a time.

The idea of factors is einops' (Rogozhnikov, 2022) and OpenXLA Shardy's; that of linear arguments, OneFlow's.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from monoflow.errors import RuleError
from monoflow.sbp import REDUCTIONS, Reduction

ELLIPSIS = "..."


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor's dimensions, each a tuple of factors, outermost first; `("...",)` stands for any number of leading ones."""

    dims: tuple[tuple[str, ...], ...]
    is_list: bool = False
    added: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed line. `linear` holds alternatives, each a set of argument terms."""

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    whole: frozenset[str] = frozenset()
    offset: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    reductions: dict[str, Reduction] = field(default_factory=dict, hash=False)
    linear: tuple[frozenset[int], ...] = ()

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=8192)
def parse(text: str) -> Rule:
    """Reads a line. Raises RuleError that repeats it."""
    return _Parser(text).rule()


_DIM = re.compile(r"\(([^()]*)\)|(\S+)")
_FACTOR = re.compile(r"(\.\.\.|[A-Za-z_][A-Za-z0-9_]*)([!@+]*)")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.marks: dict[str, set[str]] = {"!": set(), "@": set(), "+": set()}

    def error(self, why: str) -> RuleError:
        return RuleError(f"{why} in the rule {self.text!r}")

    def rule(self) -> Rule:
        body, *options = self.text.split(";")
        if body.count("->") != 1:
            raise self.error("exactly one `->` is needed")
        left, right = body.split("->")
        inputs, outputs = self.terms(left), self.terms(right)
        reductions: dict[str, Reduction] = {}
        linear: tuple[frozenset[int], ...] = ()
        for option in options:
            word, _, rest = option.strip().partition(" ")
            if word == "linear":
                linear = tuple(frozenset(map(int, part.split())) for part in rest.split("|"))
                if any(i >= len(inputs) for part in linear for i in part):
                    raise self.error(f"`{option.strip()}` counts more arguments than there are")
            elif word in REDUCTIONS:
                reductions.update(dict.fromkeys(rest.split(), word))  # type: ignore[arg-type]
            else:
                raise self.error(f"unknown option `{option.strip()}`")
        known = {f for term in inputs + outputs for dim in term.dims for f in dim}
        for factor in reductions:
            if factor not in known:
                raise self.error(f"`{factor}` is reduced but no argument has it")
        whole, offset, filled = (frozenset(self.marks[m]) for m in "!@+")
        return Rule(self.text, inputs, outputs, whole, offset, filled, reductions, linear)

    def terms(self, side: str) -> tuple[Term, ...]:
        return tuple(self.term(part.strip()) for part in side.split(",")) if side.strip() else ()

    def term(self, text: str) -> Term:
        if not text:
            raise self.error("an empty term (a tensor of no dimension is written `.`)")
        added = text.startswith("+")
        text = text.removeprefix("+").strip()
        is_list = text.startswith("[") and text.endswith("]")
        if is_list:
            text = text[1:-1].strip()
        if text == ".":
            return Term((), is_list, added)
        dims = []
        for position, found in enumerate(_DIM.finditer(text)):
            names = (found[1] if found[2] is None else found[2]).split()
            dims.append(tuple(self.factor(name) for name in names if name != "1"))
            if ELLIPSIS in dims[-1] and (position or len(names) > 1):
                raise self.error("`...` stands first in a term, alone")
        return Term(tuple(dims), is_list, added)

    def factor(self, text: str) -> str:
        found = _FACTOR.fullmatch(text)
        if found is None:
            raise self.error(f"`{text}` is not a factor")
        for mark in found[2]:
            self.marks[mark].add(found[1])
        return found[1]
