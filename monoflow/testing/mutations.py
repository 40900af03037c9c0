"""Does the check of rules see a wrong one? `python -m monoflow.testing.mutations`.

Takes rules at random from those of the ops that PyTorch's samples run, changes one factor in each (one occurrence of a factor becomes
another factor), and lets `rules.check_call` look at the op under the changed rule. Every change must be noticed.

    python -m monoflow.testing.mutations [--rules 20] [--seed 0] [--entries 60]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import fx

from monoflow._torch import operator_entries, unfrozen_generators
from monoflow.errors import CaptureError, RuleError
from monoflow.layout.call import Call
from monoflow.layout.options import groups_of
from monoflow.testing.opinfo import cases_of
from monoflow.testing.rules import calls_of, check_call


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A call of an op on sample tensors, and its rule."""

    node: fx.Node
    values: list[torch.Tensor]
    line: str

    @property
    def cut(self) -> set[str]:
        """The factors that the rule cuts, and that are long enough here to be."""
        groups = groups_of(Call.of(self.node), self.line)
        return {o.factor for group in groups for o in group.options if o.kind == "cut" and o.size > 1 and o.fits(2)}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A changed rule and what the check says of it; an empty `caught` is a change that went unnoticed."""

    op: str
    line: str
    changed: str
    caught: str


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def mutate(line: str, cut: set[str], generator: random.Random) -> str | None:
    """The line with one occurrence of one of the factors `cut` changed into another factor; None for a line without such a factor.

    Occurrences of a factor that the line has once only are left alone: to rename them changes nothing.
    """
    body, _, options = line.partition(";")
    places = [m for m in _NAME.finditer(body) if m[0] in cut]
    names = sorted({m[0] for m in places})
    often = [m for m in places if sum(m[0] == other[0] for other in places) > 1]
    if not often:
        return None
    chosen = generator.choice(often)
    other = generator.choice([*(n for n in names if n != chosen[0]), "fresh"])
    return body[: chosen.start()] + other + body[chosen.end() :] + (f";{options}" if options else "")


def candidates(entries: int, generator: random.Random) -> Iterator[Candidate]:
    """The ops that samples of some of PyTorch's operators run, each once, whose rules have factors by name that their tensors have too."""
    seen: set[str] = set()
    for entry in generator.sample(operator_entries(), entries):
        for _, make in cases_of(entry, 1):
            try:
                calls = list(calls_of(make()))
            except (CaptureError, RuntimeError, NotImplementedError, AssertionError, TypeError):
                continue  # not every operator can be part of a graph
            for node, values, line in calls:
                candidate = Candidate(node, values, line)
                if str(node.target) not in seen and all(v.numel() for v in values) and candidate.cut:
                    seen.add(str(node.target))
                    yield candidate


def judge(candidate: Candidate, changed: str) -> str:
    """What the check says of a changed rule; empty where it finds nothing wrong."""
    try:
        return next((str(f.error) for f in check_call(candidate.node, candidate.values, changed)), "")
    except RuleError as exc:
        return str(exc)


def mutations(rules: int, entries: int, seed: int) -> Iterator[Mutation]:
    """Changed rules, each judged."""
    generator = random.Random(seed)
    pool = list(candidates(entries, generator))
    generator.shuffle(pool)
    made = 0
    for candidate in pool:
        changed = mutate(candidate.line, candidate.cut, generator)
        if changed is not None and made < rules:
            made += 1
            yield Mutation(str(candidate.node.target), candidate.line, changed, judge(candidate, changed))


def main() -> int:
    """The command. 1 where a change went unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m monoflow.testing.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", type=int, default=20)
    parser.add_argument("--entries", type=int, default=60, help="operators of PyTorch's list whose samples are taken")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=180)
    table = Table("op", "rule", "changed to", "noticed by")
    with unfrozen_generators():
        found = list(mutations(options.rules, options.entries, options.seed))
    for m in found:
        caught = escape(m.caught.splitlines()[0][:70]) if m.caught else "[red]NOT NOTICED"
        table.add_row(m.op, escape(m.line), escape(m.changed), caught)
    console.print(table)
    noticed = sum(bool(m.caught) for m in found)
    console.print(f"{noticed} of {len(found)} changed rules were noticed (seed {options.seed})")
    return int(noticed < len(found) or len(found) < options.rules)


if __name__ == "__main__":
    sys.exit(main())
