"""A gate that gets its first gradient at the third window (C052), beside a weight of two elements (C070)."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    compiled: bool = False


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        opened = bool((x > 2.5).any())
        return (self.weight.sum() * x + (self.gate * x if opened else 0.0)).sum()


def build_model(args: Args) -> nn.Module:
    model = Gated()
    return torch.compile(model, backend="eager") if args.compiled else model  # type: ignore[return-value]


def build_data(args: Args, split: str) -> list[Tensor]:
    return [torch.tensor(float(index // 4 + 1)) for index in range(16)]


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch), batch.numel()
