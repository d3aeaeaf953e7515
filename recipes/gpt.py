"""A small decoder-only transformer over the bytes of a text.

To copy and change: shardrun needs nothing but the four names `Args`, `build_model`, `build_data` and `loss`.
Parameter paths, for `select:` and `optimizer.options:`

    embed.weight                     blocks.0.mlp_norm.weight
    blocks.0.attn_norm.weight        blocks.0.mlp.up.weight      (and .gate.weight with swiglu)
    blocks.0.attn.qkv.weight         blocks.0.mlp.down.weight
    blocks.0.attn.out.weight         norm.weight   head.weight
"""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from shardrun.data.sources import IGNORE, ByteTextDataset, Split, read_text

VOCABULARY = 256
bytes_per_token = 1.0  # a token is a byte, so validation also reports bits per byte


class Args(BaseModel):
    """What `recipe_args` in the config may hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str | list[str] = Field("builtin", description="globs of text files, or the text that ships with Python")
    context: int = Field(128, ge=1, description="bytes that the model sees at once")
    stride: int | None = Field(None, ge=1, description="distance of training windows (null: context, no overlap)")
    layers: int = Field(4, ge=1)
    width: int = Field(128, ge=2)
    heads: int = Field(4, ge=1)
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    hidden: int | None = Field(None, ge=1, description="width inside the MLP (null: 8/3 width for swiglu, 4 for gelu)")
    tied: bool = Field(True, description="the head uses the embedding's own weight")
    dropout: float = Field(0.0, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} over {self.heads} heads must give an even whole number per head")
        if self.stride is not None and self.stride > self.context:
            raise ValueError(f"stride {self.stride} is more than context {self.context}: bytes would be left out")
        return self

    @property
    def hidden_width(self) -> int:
        if self.hidden is not None:
            return self.hidden
        return 4 * self.width if self.mlp == "gelu" else max(8, round(self.width * 8 / 3 / 8) * 8)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, RoFormer) on queries or keys (batch, heads, length, head_dim).

    The angles are formed in float32 at each call, so that a cast of the module cannot round them.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), frequency)  # (length, head_dim / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (batch, length, width) -> the same shape."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.heads = args.heads
        self.dropout = args.dropout
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, dropout_p=dropout, is_causal=True)
        merged: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return merged


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020) or GELU feed-forward."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.up = nn.Linear(args.width, args.hidden_width, bias=False)
        self.gate = nn.Linear(args.width, args.hidden_width, bias=False) if args.mlp == "swiglu" else None
        self.down = nn.Linear(args.hidden_width, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        result: Tensor = self.down(hidden)
        return result


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(args.width, eps=1e-6)
        self.attn = Attention(args)
        self.mlp_norm = nn.RMSNorm(args.width, eps=1e-6)
        self.mlp = Mlp(args)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x)))
        result: Tensor = x + self.drop(self.mlp(self.mlp_norm(x)))
        return result


class GPT(nn.Module):
    """Tokens (batch, length) int64 -> logits (batch, length, 256)."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.width)
        self.drop = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width, eps=1e-6)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)
        self._initialise(args.layers)
        if args.tied:
            self.head.weight = self.embed.weight

    def _initialise(self, layers: int) -> None:
        for path, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # the norms start at one
            # Each layer adds to the residual stream twice; its outputs start smaller so that the sum does not grow.
            residual = path.endswith(("attn.out.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(args: Args) -> GPT:
    """The model, initialised from torch's random stream."""
    return GPT(args)


def build_data(args: Args, split: Split) -> ByteTextDataset:
    """Windows of (inputs, labels); validation never overlaps its windows."""
    stride = args.stride if split == "train" else None
    return ByteTextDataset(read_text(args.text), split, context=args.context, stride=stride)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy over the labelled tokens of a micro-batch (in nats), and how many there are."""
    inputs, labels = batch
    logits = model(inputs).flatten(0, 1).float()
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (labels != IGNORE).sum()
