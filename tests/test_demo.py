"""The demo, run as a person runs it: it learns, and an interrupted run resumes to the losses of an uninterrupted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the demo draws its loss curve")

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"


def train(text: Path, out: Path, *options: str, ranks: int = 1) -> tuple[str, dict[str, Any]]:
    sizes = "--layers 1 --width 16 --heads 2 --context 16 --batch 4 --steps 12 --warmup 3 --save-every 4 --eval-every 6 --dropout 0.1"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    command = [*start, str(SCRIPT), "--data", str(text), "--out", str(out), "--backend", "aten", *sizes.split(), *options]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout, torch.load(out / "checkpoint.pt", weights_only=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    return folder


def test_an_interrupted_run_resumes_to_the_same_losses(text: Path, tmp_path: Path) -> None:
    printed, whole = train(text, tmp_path / "whole")
    assert "unigram entropy" in printed and (tmp_path / "whole" / "loss.png").stat().st_size > 1000
    _, half = train(text, tmp_path / "parts", "--stop-after", "5")
    assert len(half["losses"]) == 5
    _, resumed = train(text, tmp_path / "parts", "--resume")
    assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 12
    assert whole["losses"][-1] < whole["losses"][0]


def test_the_same_losses_without_the_decorator(text: Path, tmp_path: Path) -> None:
    _, graph = train(text, tmp_path / "graph")
    _, eager = train(text, tmp_path / "eager", "--eager")
    assert graph["losses"] == eager["losses"]


def test_the_same_losses_on_two_processes(text: Path, tmp_path: Path) -> None:
    _, one = train(text, tmp_path / "one")
    printed, two = train(text, tmp_path / "two", ranks=2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert [v for _, v in two["held_out"]] == pytest.approx([v for _, v in one["held_out"]], rel=1e-5)
    assert "all-reduce" in printed and "PlannedTensor" not in printed and (tmp_path / "two" / "loss.png").exists()
