"""Checks the layout rules on PyTorch's own samples of every operator: `python -m monoflow.testing.opinfo`.

Each entry of `op_db` is run on meshes of 2 and 3 simulated ranks, over the layouts of its arguments, forward and gradients, in float32
(see execution.py), and each op that it runs, under every option of its rule (see rules.py). An entry is

    right          every sample on every layout, and every option, gives what the whole gives
    whole          right, but an op of it had no rule and ran on whole tensors
    wrong          some result differs, or something failed
    not captured   no sample can be part of a static graph (a result's shape depends on values, sparse results, ...): the reason is printed

    python -m monoflow.testing.opinfo [--only NAME ...] [--samples 3] [--layouts 8] [--processes 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from monoflow._torch import operator_entries, unfrozen_generators
from monoflow.errors import CaptureError
from monoflow.testing.execution import MESHES, Case, check, choices, make_case
from monoflow.testing.rules import faults
from monoflow.tree import flatten

UNDEFINED = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))
"""Entries whose values are whatever the memory holds; they are run, not compared."""

SECONDS = 300
"""After which an entry counts as wrong."""


@dataclass(slots=True)
class Result:
    """What was found for one entry."""

    name: str
    verdict: str = "right"
    cases: int = 0
    runs: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)


def entry_name(entry: Any) -> str:
    """`nn.functional.gelu`, `sum`, `linalg.det.singular`."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def dtype_of(entry: Any) -> torch.dtype:
    """Of the samples: float32, or, for what knows no float32, the first of those that it knows."""
    return next((d for d in (torch.float32, torch.complex64, torch.int64) if entry.supports_dtype(d, "cpu")), torch.float32)


def cases_of(entry: Any, samples: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The first samples of an entry as cases to be made; values that are no tensors are fixed."""
    dtype = dtype_of(entry)
    gradients = bool(entry.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    given = entry.sample_inputs("cpu", dtype, requires_grad=gradients)
    for number, sample in zip(range(samples), given, strict=False):
        leaves, _, rebuild = flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def function(*tensors: torch.Tensor, leaves: list[Any] = leaves, places: list[int] = places, rebuild: Any = rebuild) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            value, args, kwargs = rebuild(filled)
            return entry.op(value, *args, **kwargs)

        arguments = [leaves[i] for i in places]
        yield f"sample {number}", functools.partial(make_case, function, arguments, gradients)


def check_entry(entry: Any, samples: int, layouts: int) -> Result:
    """Runs an entry over its samples, meshes and layouts."""
    result = Result(entry_name(entry))
    started = time.perf_counter()
    refused: list[str] = []
    fallbacks: dict[str, None] = {}
    seen: set[Any] = set()
    for label, make in cases_of(entry, samples):
        try:
            case = make()
        except CaptureError as exc:
            refused.append(exc.reason)
            continue
        except Exception as exc:
            refused.append(f"{type(exc).__name__}: {exc}")
            continue
        result.cases += 1
        for fault in faults(case, seen=seen):
            result.verdict = "wrong"
            result.reasons.append(f"{label}: {fault}")
        for mesh_shape in MESHES:
            for chosen in choices(case, limit=layouts):
                outcome = check(case, chosen, mesh_shape)
                result.runs += 1
                fallbacks.update(dict.fromkeys(outcome.fallbacks))
                if outcome.error and not (result.name in UNDEFINED and outcome.error.startswith("result")):
                    result.verdict = "wrong"
                    result.reasons.append(f"{label}: {outcome}")
    if result.verdict == "right" and fallbacks:
        result.verdict, result.reasons = "whole", list(fallbacks)
    if not result.cases:
        result.verdict, result.reasons = "not captured", refused[:1]
    result.seconds = time.perf_counter() - started
    return result


class _TooLong(Exception):
    pass


def _alarm(*_: Any) -> None:
    raise _TooLong


def _work(job: tuple[str, int, int]) -> Result:
    name, samples, layouts = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = next(e for e in operator_entries() if entry_name(e) == name)
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    try:
        with unfrozen_generators():
            return check_entry(entry, samples, layouts)
    except _TooLong:
        return Result(name, "wrong", seconds=SECONDS, reasons=[f"not done after {SECONDS} seconds"])
    except Exception as exc:
        return Result(name, "wrong", reasons=[f"{type(exc).__name__}: {exc}"])
    finally:
        signal.alarm(0)


def run(names: list[str], samples: int, layouts: int, processes: int, console: Console, kept: IO[str] | None = None) -> list[Result]:
    """Checks the named entries (all for an empty list), several at a time. Results go to `kept` as they come, one JSON object a line."""
    known = [entry_name(e) for e in operator_entries()]
    chosen = [n for n in known if not names or n in names]
    jobs = [(n, samples, layouts) for n in dict.fromkeys(chosen)]
    found: list[Result] = []
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=100) as pool, Progress(console=console) as progress:
        task = progress.add_task("checking", total=len(jobs))
        for result in pool.imap_unordered(_work, jobs):
            found.append(result)
            if kept is not None:
                kept.write(json.dumps(asdict(result)) + "\n")
                kept.flush()
            progress.update(task, advance=1, description=f"{result.name}: {result.verdict}")
    return sorted(found, key=lambda r: known.index(r.name))


def report(results: list[Result], console: Console) -> None:
    """Prints the verdicts, with reasons for all that is not right."""
    for verdict in ("wrong", "not captured", "whole"):
        rows = [r for r in results if r.verdict == verdict]
        if not rows:
            continue
        table = Table(title=f"{verdict} ({len(rows)})", title_justify="left", show_header=False)
        for r in rows:
            table.add_row(r.name, (r.reasons[0].splitlines() or [""])[0][:160] if r.reasons else "", f"{len(r.reasons)}")
        console.print(table)
    counts = collections.Counter(r.verdict for r in results)
    runs = sum(r.runs for r in results)
    console.print(
        f"{len(results)} entries, {runs} runs: {counts['right']} right, {counts['wrong']} wrong, "
        f"{counts['whole']} ran whole for lack of a rule, {counts['not captured']} not captured; "
        f"{100 * counts['right'] / max(len(results), 1):.1f} % never fell back"
    )


def main() -> int:
    """The command. 1 where an entry is wrong."""
    parser = argparse.ArgumentParser(prog="python -m monoflow.testing.opinfo", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of entries")
    parser.add_argument("--samples", type=int, default=3, help="samples of each entry")
    parser.add_argument("--layouts", type=int, default=8, help="choices of layouts for each sample and mesh")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", help="where to write the results, one JSON object a line")
    options = parser.parse_args()
    console = Console(width=200)
    with open(options.json, "w") if options.json else contextlib.nullcontext() as kept:
        results = run(options.only, options.samples, options.layouts, options.processes, console, kept)
    report(results, console)
    return 1 if any(r.verdict == "wrong" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
