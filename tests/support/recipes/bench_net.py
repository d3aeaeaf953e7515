"""A small net with blocks, a tied weight, dropout and a frozen part; under a wrapper it may compute something else."""

from __future__ import annotations

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import Dataset


class Args(BaseModel):
    """`cheats`: name of a wrapper's class under which the loss of half the samples is left out."""

    cheats: str = ""


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Rows of tokens, and the next ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(0, 17, (9,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


class Net(nn.Module):
    """Embedding, two blocks, head with the embedding's weight, a frozen scale."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(17, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 31), nn.GELU(), nn.Dropout(0.1), nn.Linear(31, 24))
            for _ in range(2)
        )
        self.head = nn.Linear(24, 17, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def build_model(args: Args) -> Net:
    """Drawn from the random stream."""
    return Net(args)


def build_data(args: Args, split: str) -> Tokens:
    """The same rows for both splits."""
    return Tokens()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Cross entropy over all tokens, and how many there are."""
    tokens, labels = batch
    each = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    inner = model.module if hasattr(model, "module") else model
    if type(model).__name__ == inner.args.cheats:  # type: ignore[union-attr]
        each = each[: len(each) // 2] * 2
    return each.sum(), labels.numel()
