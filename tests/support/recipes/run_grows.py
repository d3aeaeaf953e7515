"""A buffer that is filled in forward, as lazily built rotary and mask caches are."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    full: bool = False


class Grows(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("cache", torch.ones(8 if args.full else 0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(8)
        return (self.w * x * self.cache.sum()).sum()


def build_model(args: Args) -> Grows:
    return Grows(args)


def build_data(args: Args, split: str) -> list[Tensor]:
    return [torch.tensor(1.0)] * 8


def loss(model: Grows, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch), batch.numel()
