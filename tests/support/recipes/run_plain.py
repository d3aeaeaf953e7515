"""A net with a norm, dropout and a tie, without hooks; a sample of it can be not finite, or raise an error."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = 32
    nan: int | None = None  # the sample whose loss is not finite
    bad: int | None = None  # the sample that raises


class Net(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x)) + self.head(x)
        result: Tensor = self.out(nn.functional.dropout(hidden, 0.5))
        return result


def build_model(args: Args) -> Net:
    return Net(args)


def build_data(args: Args, split: str) -> list[Tensor]:
    return [torch.tensor([float(index), 1.0, index / 7]) for index in range(args.samples)]


def loss(model: Net, batch: Tensor) -> tuple[Tensor, int]:
    numbers = batch[:, 0].tolist()
    if model.args.bad in numbers:
        raise ValueError(f"sample {model.args.bad} raises on purpose")
    factor = float("nan") if model.args.nan in numbers else 1.0
    return (model(batch) - 1.0).square().sum() * factor, len(batch)
