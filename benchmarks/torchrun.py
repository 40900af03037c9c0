"""Starts a benchmark of this folder again on several processes, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def on_ranks(ranks: int, module: str, *arguments: str) -> str:
    """What the first rank of `python -m module *arguments FILE` on `ranks` processes of one thread has written to FILE.

    Raises: RuntimeError, with the last words of the processes, where nothing was written.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder, "found")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run([*command, *arguments, str(file)], env=env, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
        if not file.exists():
            raise RuntimeError(f"{module} on {ranks} ranks failed:\n{done.stderr[-4000:]}")
        return file.read_text()
