"""Small models with dropout or batch norm, for runs over ranks: fast in a test, and with what makes ranks differ in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc2(self.drop(F.gelu(self.fc1(x)))), y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.v, self.out = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)  # its gradient would be zero, but for rounding

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.ln2(x)))))


class GPT(nn.Module):
    """Tokens in, the loss of the next ones out."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 48, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten(), ignore_index=-1)


class ConvNet(nn.Module):
    """Two convolutions with batch norm, on images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)) + x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def batch(name: str, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "gpt":
        ids = torch.randint(0, 48, (size, 9), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, :5] = -1  # not as many targets on every rank
        return ids[:, :-1].contiguous(), targets
    shape = (size, 8) if name == "mlp" else (size, 3, 8, 8)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randint(0, 5, (size,), generator=generator)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"mlp": MLP, "gpt": GPT, "convnet": ConvNet}

COLUMN, ROW = ["B", "S(0)"], ["B", "S(1)"]

TENSOR_PARALLEL: Mapping[str, Mapping[str, list[str]]] = {
    "mlp": {"fc1.*": COLUMN, "fc2.weight": ROW},
    "gpt": {
        "*.attn.[qkv].*": COLUMN,
        "*.attn.out.weight": ROW,
        "*.fc1.*": COLUMN,
        "*.fc2.weight": ROW,
        "head.weight": COLUMN,
        "tokens.weight": COLUMN,
    },
}
"""Megatron's pattern (Shoeybi et al., 2019): the first layer of a pair is cut by its outputs, the second by its inputs."""
