"""Runs a function on several real processes, as torchrun would start them."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class ProcessesFailed(Exception):
    """At least one process failed or was not done in time; `errors` has the output of each rank, `codes` the exit codes."""

    def __init__(self, errors: list[str], codes: list[int | None]) -> None:
        self.errors, self.codes = errors, codes
        super().__init__("\n".join(f"rank {r} (exit code {c}):\n{e}" for r, (e, c) in enumerate(zip(errors, codes, strict=True))))


def run_on(ranks: int, function: str, *args: Any, timeout: float = 120) -> list[Any]:
    """What `function` ("module:name") returns for `args` on each of `ranks` gloo processes. Raises ProcessesFailed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function, args)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes, outputs = [], []
        for rank in range(ranks):
            env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            outputs.append(stack.enter_context(open(Path(folder, f"output{rank}"), "w+")))
            command = [sys.executable, "-m", "tests.processes", str(call), str(Path(folder, f"result{rank}"))]
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=outputs[-1], stderr=subprocess.STDOUT))
        end = time.monotonic() + timeout
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(0.02)
        for p in processes:
            if p.poll() is None:
                p.kill()
        codes = [p.wait() for p in processes]
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
        if any(codes):
            raise ProcessesFailed(texts, codes)
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


def _main() -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*args)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # the first rank keeps the store that the others still talk to
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
