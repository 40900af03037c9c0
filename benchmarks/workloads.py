"""The training steps that the benchmarks time: a model, a batch and a loss each, all of them functions of a seed alone.

Sizes are for one core of a CPU. No model has dropout, so that every way of running a step must arrive at the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Step = Callable[..., Tensor]


class MLP(nn.Module):
    """Six layers of Linear and ReLU and a classifier: (batch, width) -> (batch, classes). Small ops, so overhead is the cost."""

    def __init__(self, width: int = 64, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer with tied embeddings: token ids (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = 2048, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    """The basic block of ResNet-18: two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 32x32 images, half as wide: (batch, 3, 32, 32) -> (batch, classes)."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        strides = [1, 1, 2, 1, 2, 1, 2, 1]
        self.blocks = nn.Sequential(*(ResidualBlock(i, o, s) for i, o, s in zip([width, *widths], widths, strides, strict=False)))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2048,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a classifier."""
    return F.cross_entropy(model(x), y)


def predict_next(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of a language model."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def fill_masked(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The masked-word loss that a Hugging Face model computes itself."""
    return model(input_ids=ids, labels=labels).loss


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def _images(generator: torch.Generator) -> Batch:
    return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def _text(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, 2048, (8, 129), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _masked_text(generator: torch.Generator) -> Batch:
    ids = torch.randint(4, 2048, (8, 128), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return ids.masked_fill(hidden, 3), ids.masked_fill(~hidden, -100)


@dataclass(frozen=True)
class Workload:
    """A model, its batches and its loss.

    make_model  () -> module, called under a fixed seed
    make_batch  generator -> the tensors of a batch
    loss        (model, *batch) -> scalar tensor
    about       a few words for the tables
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Step
    about: str

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode; its weights depend on `seed` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model().train()

    def batch(self, seed: int = 0) -> Batch:
        """The tensors of one batch, the same for the same seed."""
        return self.make_batch(torch.Generator().manual_seed(seed))


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_function: Step) -> Step:
    """The step that every contender runs: forward, loss, backward, clipping, update, and gradients dropped."""

    def step(*batch: Tensor) -> Tensor:
        loss = loss_function(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(MLP, _vectors, classify, "MLP, 6 layers of 64, batch 32"),
    "gpt-4M": Workload(lambda: GPT(layers=6, width=224, heads=7), _text, predict_next, "GPT, 6 layers of 224, batch 8 x 128"),
    "gpt-30M": Workload(lambda: GPT(layers=12, width=448, heads=7), _text, predict_next, "GPT, 12 layers of 448, batch 8 x 128"),
    "gpt-120M": Workload(lambda: GPT(layers=12, width=896, heads=14), _text, predict_next, "GPT, 12 layers of 896, batch 8 x 128"),
    "gpt-4layer": Workload(lambda: GPT(layers=4, width=256, heads=4), _text, predict_next, "GPT, 4 layers of 256, batch 8 x 128"),
    "gpt-12layer": Workload(lambda: GPT(layers=12, width=256, heads=4), _text, predict_next, "GPT, 12 layers of 256, batch 8 x 128"),
    "resnet": Workload(ResNet, _images, classify, "ResNet-18 at half width, batch 8 x 32 x 32"),
    "bert": Workload(_bert, _masked_text, fill_masked, "BERT (transformers), 4 layers of 256, batch 8 x 128"),
}
"""Name -> workload."""
