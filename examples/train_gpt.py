"""Train a small byte-level GPT on one machine, the whole training step compiled as one graph.

    make demo                                               # installs what is needed, then trains on two processes
    torchrun --nproc-per-node 2 examples/train_gpt.py       # the same in your own environment; writes demo_output/
    python examples/train_gpt.py                            # on one process: the same losses
    python examples/train_gpt.py --data ~/notes             # any folder of text
    python examples/train_gpt.py --stop-after 400           # stop early ...
    python examples/train_gpt.py --resume                   # ... and go on to the very losses of an uninterrupted run
    python examples/train_gpt.py --eager --out eager_output # plain PyTorch: the decorator left away, the rest unchanged

The text is the source and docstrings of Python's standard library, which every machine with Python has.
"""

import argparse
import math
import os
import random
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import monoflow as mf

EVAL_BATCHES = 8  # held-out batches per evaluation, the same ones every time
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

Step = Callable[[Tensor, Tensor], Tensor]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with the whole step as one graph.")
    option = parser.add_argument
    option("--data", type=Path, help="a folder of text (default: the Python standard library)")
    option("--megabytes", type=float, default=8, help="use at most this much text (default: %(default)s)")
    option("--steps", type=int, default=800, help="length of the whole run and of its schedule (default: %(default)s)")
    option("--batch", type=int, default=16, help="sequences per step (default: %(default)s)")
    option("--context", type=int, default=64, help="bytes per sequence (default: %(default)s)")
    option("--layers", type=int, default=3, help="(default: %(default)s)")
    option("--heads", type=int, default=5, help="(default: %(default)s)")
    option("--width", type=int, default=160, help="(default: %(default)s)")
    option("--dropout", type=float, default=0.0, help="(default: %(default)s)")
    option("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    option("--warmup", type=int, default=50, help="steps of linear warm-up (default: %(default)s)")
    option("--seed", type=int, default=0, help="(default: %(default)s)")
    option("--backend", choices=["auto", "aten", "inductor"], default="auto", help="(default: %(default)s)")
    option("--eager", action="store_true", help="leave the decorator away: plain PyTorch")
    option("--threads", type=int, default=1, help="CPU threads; a model this small gains little from more (default: %(default)s)")
    option("--eval-every", type=int, default=100, help="steps between evaluations (default: %(default)s)")
    option("--save-every", type=int, default=200, help="steps between checkpoints (default: %(default)s)")
    option("--sample", type=int, default=400, help="bytes of text to generate at the end (default: %(default)s)")
    option("--out", type=Path, default=Path("demo_output"), help="where results go (default: %(default)s)")
    option("--resume", action="store_true", help="go on from the checkpoint in --out")
    option("--stop-after", type=int, metavar="N", help="stop, with a checkpoint, once N steps are done")
    return parser.parse_args()


def load_text(folder: Path | None, megabytes: float) -> Tensor:
    """The bytes of a folder's text files, in a fixed shuffled order: a uint8 tensor."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SystemExit(f"{root} is not a folder")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*" if folder else "*.py") if path.is_file())
    if not folder:
        names = [name for name in names if not SKIPPED_FOLDERS & set(name.split("/"))]
    random.Random(0).shuffle(names)  # so that the held-out end is like the rest
    text, limit = bytearray(), int(megabytes * 1e6)
    for name in names:
        data = (root / name).read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue  # no text
        text += data
        if len(text) >= limit:
            break
    if len(text) < 10_000:
        raise SystemExit(f"{root} holds {len(text)} bytes of UTF-8 text; training needs at least 10,000")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def unigram_entropy(text: Tensor) -> float:
    """The loss, in nats per byte, of the best guess that knows only how frequent each byte is."""
    p = torch.bincount(text, minlength=256).double() / len(text)
    return -torch.special.xlogy(p, p).sum().item()


def draw_batch(text: Tensor, batch: int, context: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the same moved on by one byte: two int64 tensors, (batch, context)."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=rng)
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint so that a crash half way leaves the earlier one whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(checkpoint, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint and check that it was made with the same settings."""
    if not path.exists():
        raise SystemExit(f"nothing to resume from: {path} does not exist")
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    saved = checkpoint["settings"]
    if differing := [f"{key} is {settings[key]}, was {saved[key]}" for key in settings if settings[key] != saved[key]]:
        raise SystemExit(f"{path} is from a run with other settings: " + "; ".join(differing))
    return checkpoint


def plot_losses(path: Path, title: str, losses: list[float], held_out: list[list[float]], unigram: float) -> None:
    """Draw the loss curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.6, label="training")
    axes.plot(*zip(*held_out, strict=True), marker="o", markersize=4, label="held out")
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))  # as torchrun says
    if args.eager and ranks > 1:
        raise SystemExit("--eager runs on one process: start it with python")
    if args.batch % ranks:
        raise SystemExit(f"--batch {args.batch} does not divide over {ranks} processes")
    placement = mf.placement.all("cpu") if ranks > 1 else None
    console = Console(highlight=False, quiet=rank > 0)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint_path, picture_path = args.out / "checkpoint.pt", args.out / "loss.png"

    # Data: the last 5 % of the text is held out.
    text = load_text(args.data, args.megabytes)
    split = int(0.95 * len(text))
    training_text, held_out_text = text[:split], text[split:]
    if len(held_out_text) <= args.context:
        raise SystemExit(f"too little text: {len(held_out_text)} held-out bytes for a context of {args.context}")
    unigram = unigram_entropy(text)
    batch_rng = torch.Generator().manual_seed(args.seed)
    eval_rng = torch.Generator().manual_seed(0)
    eval_batches = [draw_batch(held_out_text, args.batch, args.context, eval_rng) for _ in range(EVAL_BATCHES)]

    # Model, optimizer, schedule: ordinary PyTorch.
    model = GPT(GPTConfig(256, args.context, args.layers, args.heads, args.width, args.dropout))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    def schedule(step: int) -> float:
        """Linear warm-up, then a cosine down to 2 % at the end of the run."""
        progress = (step - args.warmup) / max(1, args.steps - args.warmup)
        return (step + 1) / args.warmup if step < args.warmup else 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)

    # The two steps, each one graph. With --eager the decorator does nothing.
    def graph(*state: Any) -> Callable[[Step], Step]:
        return (lambda step: step) if args.eager else mf.graph(*state, placement=placement, backend=args.backend)

    def own(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This process's part of a batch. All of them draw the same one."""
        x, y = (t.chunk(ranks)[rank] for t in batch)
        return x, y

    @graph(model, opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    @graph(model)
    def held_out_loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def evaluate() -> float:
        model.eval()
        loss = torch.stack([held_out_loss(*own(batch)) for batch in eval_batches]).mean().item()
        model.train()
        return loss

    # Everything that decides the numbers of the run, so that --resume can tell a different run.
    names = ["steps", "batch", "context", "layers", "heads", "width", "dropout", "lr", "warmup", "seed", "eval_every"]
    settings = {name: getattr(args, name) for name in names} | {"text": zlib.crc32(text.numpy().tobytes())}
    losses: list[float] = []  # one per step
    held_out: list[list[float]] = []  # [step, loss]
    if args.resume:
        checkpoint = load_checkpoint(checkpoint_path, settings)
        model.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        batch_rng.set_state(checkpoint["batch_rng"])
        torch.set_rng_state(checkpoint["torch_rng"])  # dropout's
        losses, held_out = checkpoint["losses"], checkpoint["held_out"]

    def save() -> None:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": opt.state_dict(),
            "scheduler": scheduler.state_dict(),
            "batch_rng": batch_rng.get_state(),
            "torch_rng": torch.get_rng_state(),
            "losses": losses,
            "held_out": held_out,
            "settings": settings,
        }
        if rank == 0:
            save_checkpoint(checkpoint_path, checkpoint)

    size = sum(p.numel() for p in model.parameters())
    source = f"folder {args.data}" if args.data else f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
    console.print(
        f"text    {len(text) / 1e6:.1f} MB from the {source}; unigram entropy {unigram:.3f} nats/byte", markup=False, soft_wrap=True
    )
    console.print(f"model   {size / 1e6:.2f}M parameters, {args.layers} layers of width {args.width}, context {args.context}")
    console.print(
        f"run     {args.steps} steps of {args.batch * args.context} bytes, {args.threads} thread{'s' * (args.threads != 1)}, ", end=""
    )
    console.print("plain PyTorch" if args.eager else f"monoflow graph, backend {args.backend}, {ranks} process{'es' * (ranks > 1)}")

    start, stop = len(losses), max(len(losses), min(args.steps, args.stop_after or args.steps))
    progress = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TextColumn("loss {task.fields[loss]:.3f} (unigram {task.fields[unigram]:.2f})  lr {task.fields[lr]:.1e}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s  ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar = progress.add_task("", total=args.steps, completed=start, loss=math.nan, unigram=unigram, lr=0.0, speed=0.0)
    began, speed, first_step = time.perf_counter(), 0.0, 0.0

    model.train()
    try:
        for step in range(start + 1, stop + 1):
            lr = scheduler.get_last_lr()[0]
            tick = time.perf_counter()
            x, y = own(draw_batch(training_text, args.batch, args.context, batch_rng))
            losses.append(train(x, y).item())
            scheduler.step()
            seconds = time.perf_counter() - tick

            if step == start + 1:  # the first call captures and compiles
                first_step = seconds
                console.print(f"first step after {first_step:.1f} s, loss {losses[-1]:.3f}")
            else:
                now = args.batch * args.context / seconds
                speed = 0.95 * speed + 0.05 * now if speed else now
            if step % args.eval_every == 0 or step == args.steps:
                progress.stop()  # the first evaluation compiles, with a progress line of its own
                held_out.append([step, evaluate()])
                console.print(
                    f"step {step:5d}  loss {sum(losses[-50:]) / len(losses[-50:]):.3f}  held out {held_out[-1][1]:.3f}  "
                    f"lr {lr:.1e}  {speed:6,.0f} tokens/s  {time.perf_counter() - began:4.0f} s"
                )
            if step % args.save_every == 0 or step == stop:
                save()
            if step < stop:
                progress.start()
            progress.update(bar, completed=step, loss=losses[-1], lr=lr, speed=speed)
    finally:
        progress.stop()

    if placement is not None and stop > start:
        console.print(str(train.plan(x, y)), markup=False, soft_wrap=True)  # type: ignore[attr-defined]
    if stop > start:
        console.print(f"\n{stop - start} steps in {time.perf_counter() - began:.0f} s, the first in {first_step:.1f} s")
    else:
        console.print(f"\n{start} steps were done already")
    console.print(f"checkpoint {checkpoint_path}", markup=False, soft_wrap=True)
    if stop < args.steps:
        console.print("stopped early: --resume goes on")
        return
    if rank:
        return
    plot_losses(picture_path, f"Byte-level GPT, {size / 1e6:.2f}M parameters, on the {source}", losses, held_out, unigram)
    console.print(f"loss curve {picture_path}", markup=False, soft_wrap=True)
    console.print(f"held out {held_out[-1][1]:.3f} nats/byte, unigram entropy {unigram:.3f}\n\na sample of what it learned:\n")
    prompt = torch.tensor(list(b"def "))
    sample = model.generate(prompt, args.sample, generator=torch.Generator().manual_seed(args.seed))
    console.print(bytes(sample.tolist()).decode(errors="replace"), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
