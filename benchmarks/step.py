"""The same training step, run every way there is: `python -m benchmarks.step`.

For each workload, each contender lives in a process of its own with one thread and an empty compile cache. The parent asks one at a
time to set up, to warm up and then, round after round in rotating order, to run a few steps, so that whatever else the machine does
falls on all of them alike. Reported for each contender:

- step: the median of all timed steps, and its ratio to the fastest contender that is not monoflow;
- CPU: the same in processor time, which a busy machine disturbs less;
- first step: seconds from the plain Python step function (before any decoration) to the end of its first call. Imports, building the
  model and making the batches are not counted;
- settled: the same up to the end of the last warm-up step, which counts what a contender compiles on later calls;
- peak memory: the most the process ever held, less what it held after its imports. Compiler processes are not counted.

All contenders take the same steps on the same batches from the same weights, and the losses of the first ten steps are compared
(to 1e-3 relative; rounding makes any two runs drift apart in the long run).

The two monoflow contenders and the `torch.compile`d model use `AdamW(fused=True)`, the fastest that eager offers; `torch.compile` of
the whole step takes `foreach=True`, which it can compile where fused it cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.contenders import COMPARED, TOLERANCE, Contender, Setup, adamw, disagreement
from benchmarks.report import console as make_console
from benchmarks.report import peak_memory
from benchmarks.workloads import WORKLOADS, Step, training_step

WARM_UP = 5
BATCHES = 32


def _eager(model: nn.Module, loss: Step) -> Step:
    return training_step(model, adamw(model), loss)


def _eager_fused(model: nn.Module, loss: Step) -> Step:
    return training_step(model, adamw(model, fused=True), loss)


def _compile_model(model: nn.Module, loss: Step) -> Step:
    optimizer = adamw(model, fused=True)
    compiled = torch.compile(model)
    return training_step(compiled, optimizer, loss)  # type: ignore[arg-type]


def _compile_step(model: nn.Module, loss: Step) -> Step:
    return torch.compile(training_step(model, adamw(model, foreach=True), loss))


def _compile_step_backward(model: nn.Module, loss: Step) -> Step:
    import torch._dynamo

    torch._dynamo.config.trace_autograd_ops = True
    step = training_step(model, adamw(model, foreach=True), loss)
    return torch.compile(lambda *batch: step(*batch).detach())


def _monoflow(backend: str) -> Setup:
    def setup(model: nn.Module, loss: Step) -> Step:
        import monoflow as mf

        optimizer = adamw(model, fused=True)
        return mf.graph(model, optimizer, backend=backend)(training_step(model, optimizer, loss))

    return setup


CONTENDERS: dict[str, Contender] = {
    "eager": Contender("eager", _eager),
    "eager-fused": Contender("eager, fused AdamW", _eager_fused),
    "compile-model": Contender("torch.compile(model)", _compile_model),
    "compile-step": Contender("torch.compile(step)", _compile_step),
    "compile-step-backward": Contender("torch.compile(step), backward traced", _compile_step_backward),
    "mf-aten": Contender("mf.graph aten", _monoflow("aten"), peer=False),
    "mf-inductor": Contender("mf.graph inductor", _monoflow("inductor"), peer=False),
}
"""Name -> contender."""


# The worker process: one contender on one workload, told what to do over its standard input, one JSON object a line.


def worker(contender: str, workload: str) -> None:
    """Answer the parent until it closes the pipe: `{"warm_up": n}`, then any number of `{"run": n}`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer

    import torch._dynamo
    import torch._inductor.compile_fx

    if contender.startswith("mf-"):
        import monoflow  # noqa: F401
    if workload == "bert":
        import transformers.models.bert.modeling_bert  # noqa: F401

    torch.set_num_threads(1)
    imported = peak_memory()
    work = WORKLOADS[workload]
    model = work.build(seed=0)
    batches = [work.batch(seed) for seed in range(BATCHES)]
    losses: list[float] = []
    step: Step | None = None
    for line in sys.stdin:
        request: dict[str, int] = json.loads(line)
        answer: dict[str, Any] = {}
        if step is None:
            start = time.perf_counter()
            step = CONTENDERS[contender].setup(model, work.loss)
            for index in range(request["warm_up"]):
                losses.append(float(step(*batches[index % BATCHES]).detach()))
                if index == 0:
                    answer["first_step"] = time.perf_counter() - start
            answer["settled"] = time.perf_counter() - start
        else:
            seconds, cpu_seconds = [], []
            for _ in range(request["run"]):
                batch = batches[len(losses) % BATCHES]
                start, cpu_start = time.perf_counter(), time.process_time()
                loss = step(*batch)
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu_start)
                losses.append(float(loss.detach()))
            answer["seconds"], answer["cpu_seconds"] = seconds, cpu_seconds
        print(json.dumps({**answer, "losses": losses, "peak_memory": peak_memory() - imported}), file=answers)


# The parent.


@dataclass
class Result:
    """What one contender did on one workload: seconds, bytes and losses."""

    contender: str
    workload: str
    first_step: float = math.nan
    settled: float = math.nan
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_memory: int = 0
    error: str = ""

    @property
    def step(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def cpu_step(self) -> float:
        """Median processor seconds per step."""
        return statistics.median(self.cpu_seconds) if self.cpu_seconds else math.nan

    @property
    def peer(self) -> bool:
        return CONTENDERS[self.contender].peer


class Process:
    """The parent's end of a worker."""

    def __init__(self, contender: str, workload: str, directory: Path) -> None:
        self.result = Result(contender, workload)
        cache = directory / f"{workload}-{contender}"
        cache.mkdir()
        self.log = (cache / "log").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", "--worker", contender, workload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
        )

    def ask(self, **request: int) -> None:
        """Have the worker do something and wait for it; a worker that dies leaves its last words in `result.error`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            self.log.seek(0)
            self.result.error = self.log.read().strip()[-4000:] or f"exit status {self.process.returncode}"
            return
        answer = json.loads(line)
        self.result.seconds += answer.pop("seconds", [])
        self.result.cpu_seconds += answer.pop("cpu_seconds", [])
        for name, value in answer.items():
            setattr(self.result, name, value)

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def fill(running: Sequence[Process], burst: float) -> int:
    """How many steps of the fastest contender take `burst` seconds, at least 2 and at most 200."""
    for process in running:
        process.ask(run=2)
    fastest = min((min(process.result.seconds) for process in running if process.result.seconds), default=burst)
    for process in running:
        process.result.seconds.clear()
        process.result.cpu_seconds.clear()
    return max(2, min(200, round(burst / fastest)))


def measure(workload: str, contenders: Sequence[str], rounds: int, steps: int | None, burst: float, console: Console) -> list[Result]:
    """Run every contender on one workload. `steps` a round; None takes as many as fill `burst` seconds."""
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, console.status("") as status:
        try:
            for name in contenders:
                status.update(f"{workload}: {CONTENDERS[name].label}, first step")
                process = Process(name, workload, Path(directory))
                processes.append(process)
                process.ask(warm_up=WARM_UP)
            running = [process for process in processes if not process.result.error]
            if steps is None:
                steps = fill(running, burst)
            for number in range(rounds):
                for index in range(len(running)):
                    process = running[(index + number) % len(running)]
                    status.update(f"{workload}: round {number + 1} of {rounds}, {CONTENDERS[process.result.contender].label}")
                    process.ask(run=steps)
        finally:
            for process in processes:
                process.close()
    return [process.result for process in processes]


def losses_apart(results: Sequence[Result]) -> float:
    """How far the losses of those that did not fail are apart."""
    return disagreement([result.losses for result in results if not result.error])


def best_peer(results: Sequence[Result], cpu: bool = False) -> float:
    """Median step seconds (or processor seconds) of the fastest contender that is not monoflow; nan when there is none."""
    peers = [result for result in results if result.peer and not result.error]
    return min((result.cpu_step if cpu else result.step for result in peers), default=math.nan)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def show(workload: str, results: Sequence[Result], console: Console) -> None:
    """Print one workload's table, and whether the losses agree."""
    table = Table(title=f"{workload}: {WORKLOADS[workload].about}", title_justify="left")
    table.add_column("contender")
    for column in ("step ms", "x best peer", "CPU ms", "x best peer", "first step s", "settled s", "peak MB", "loss"):
        table.add_column(column, justify="right")
    best, best_cpu = best_peer(results), best_peer(results, cpu=True)
    for result in results:
        label = CONTENDERS[result.contender].label
        if result.error:
            table.add_row(label, "[red]failed", *[""] * 7)
            continue
        table.add_row(
            label if result.peer else f"[bold]{label}",
            _milliseconds(result.step),
            f"{result.step / best:.2f}",
            _milliseconds(result.cpu_step),
            f"{result.cpu_step / best_cpu:.2f}",
            f"{result.first_step:.2f}",
            f"{result.settled:.2f}",
            f"{result.peak_memory / 1e6:.0f}",
            f"{result.losses[-1]:.6f}",
        )
    console.print(table)
    for result in results:
        if result.error:
            console.print(f"[red]{result.contender} failed:[/] ", end="")
            console.print(result.error, markup=False, highlight=False)
    done = [result for result in results if not result.error]
    if len(done) > 1:
        worst = losses_apart(results)
        verdict = "[green]agree[/]" if worst <= TOLERANCE else "[red]DISAGREE[/]"
        count = min(COMPARED, len(done[0].losses))
        console.print(f"Losses of the first {count} steps {verdict}: largest relative difference {worst:.1e} (at most {TOLERANCE:.0e}).\n")


def verdicts(results: dict[str, list[Result]]) -> list[tuple[str, float, float]]:
    """The aims that these results can decide: (what, measured, at most)."""
    table = {workload: {result.contender: result for result in found if not result.error} for workload, found in results.items()}
    decided: list[tuple[str, float, float]] = []
    for workload, found in table.items():
        best = best_peer(list(found.values()))
        inductor, aten = found.get("mf-inductor"), found.get("mf-aten")
        eager = min((found[name].step for name in ("eager", "eager-fused") if name in found), default=math.nan)
        compiled = min((result.first_step for name, result in found.items() if name.startswith("compile")), default=math.nan)
        if inductor:
            aim = 0.6 if workload == "mlp" else 1.0
            decided.append((f"{workload}: inductor step / best peer", inductor.step / best, aim))
            decided.append((f"{workload}: inductor first step / torch.compile", inductor.first_step / compiled, 1.0))
        if aten:
            decided.append((f"{workload}: aten step / best eager", aten.step / eager, 1.0))
            decided.append((f"{workload}: aten first step / torch.compile", aten.first_step / compiled, 1 / 3))
            if workload == "gpt-12layer":
                decided.append((f"{workload}: aten first step, seconds", aten.first_step, 10.0))
    deep, shallow = (table.get(name, {}).get("mf-inductor") for name in ("gpt-12layer", "gpt-4layer"))
    if deep and shallow:
        decided.append(("inductor first step, 12 layers / 4 layers", deep.first_step / shallow.first_step, 1.5))
    return [(what, value, aim) for what, value, aim in decided if not math.isnan(value)]


def markdown(results: dict[str, list[Result]]) -> str:
    """Three GitHub tables, a row per workload and a column per contender: step, first step, peak memory."""
    names = [name for name in CONTENDERS if any(result.contender == name for found in results.values() for result in found)]
    parts = []
    for title, cell in (
        ("Milliseconds per step (median)", lambda result: _milliseconds(result.step)),
        ("Seconds to the first step", lambda result: f"{result.first_step:.1f}"),
        ("Peak memory, MB", lambda result: f"{result.peak_memory / 1e6:.0f}"),
    ):
        ratio = title.startswith("Milliseconds")
        header = [title, *(CONTENDERS[name].label for name in names)] + (["inductor / best peer"] if ratio else [])
        lines = [f"| {' | '.join(header)} |", f"|{'---|' + '---:|' * (len(header) - 1)}"]
        for workload, found in results.items():
            by_name = {result.contender: result for result in found if not result.error}
            cells = [cell(by_name[name]) if name in by_name else "-" for name in names]
            if ratio:
                cells.append(f"{by_name['mf-inductor'].step / best_peer(found):.2f}" if "mf-inductor" in by_name else "-")
            lines.append(f"| {' | '.join([WORKLOADS[workload].about, *cells])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", type=lambda text: _names(text, list(WORKLOADS)), help=f"comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--contenders", type=lambda text: _names(text, list(CONTENDERS)), default=list(CONTENDERS), help="comma-separated")
    parser.add_argument("--rounds", type=int, help="rounds of timed steps (default 10)")
    parser.add_argument("--steps", type=int, help="steps a round (default: as many as take half a second, at least 2)")
    parser.add_argument("--quick", action="store_true", help="the MLP and the smallest GPT, 3 short rounds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every number to this file")
    parser.add_argument("--markdown", action="store_true", help="also print GitHub tables")
    parser.add_argument("--worker", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(*options.worker)
        return 0

    console = make_console()
    workloads = options.workloads or (["mlp", "gpt-4layer"] if options.quick else list(WORKLOADS))
    rounds = options.rounds or (3 if options.quick else 10)
    results: dict[str, list[Result]] = {}
    for workload in workloads:
        burst = 0.1 if options.quick else 0.5
        results[workload] = measure(workload, options.contenders, rounds, options.steps, burst, console)
        show(workload, results[workload], console)
        if options.json:
            options.json.write_text(json.dumps([asdict(result) for found in results.values() for result in found], indent=1))
    for what, value, aim in verdicts(results):
        console.print(
            f"{'[green]met   [/]' if value <= aim else '[red]missed[/]'} {what}: {value:.2f} (aim: at most {aim:.2f})", highlight=False
        )
    if options.markdown:
        print(markdown(results))
    failed = any(result.error for found in results.values() for result in found)
    wrong = any(losses_apart(found) > TOLERANCE for found in results.values())
    return int(failed or wrong)


if __name__ == "__main__":
    sys.exit(main())
