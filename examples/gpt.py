"""A small byte-level GPT: the model that `train_gpt.py` trains.

GPT-2's layout (Radford et al., 2019): pre-norm blocks, learned positions, the output layer tied to the embedding.
Ordinary PyTorch, with nothing of monoflow in it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `context` is the longest input, in tokens; `vocab` is 256, one token per byte."""

    vocab: int = 256
    context: int = 64
    layers: int = 3
    heads: int = 5
    width: int = 160
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention over several heads: (batch, time, width) -> (batch, time, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, c)), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.proj(F.gelu(self.up(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer: attention, then the MLP, each around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, the logits of each next byte out: (batch, time) int64 -> (batch, time, vocab) float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}")
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # the layers that end a residual branch start smaller, as in GPT-2
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        h = F.dropout(h, self.config.dropout, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.8, generator: torch.Generator | None = None) -> Tensor:
        """Append `length` sampled tokens to `prompt`, shape (time,). Plain eager PyTorch, one token at a time."""
        was_training = self.training
        self.eval()
        text = prompt
        for _ in range(length):
            logits = self(text[-self.config.context :].unsqueeze(0))[0, -1]
            choice = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
            text = torch.cat([text, choice])
        self.train(was_training)
        return text
