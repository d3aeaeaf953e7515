"""Two layers, the first one frozen. Another seed in the environment builds another model, as a changed file would."""

from __future__ import annotations

import os

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(5, 1, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[1](torch.tanh(self.layers[0](x)))
        return result


def build_model(args: Args) -> Two:
    other = os.environ.get("CASE_C034_SEED")
    if other is not None:
        torch.manual_seed(int(other))
    model = Two()
    frozen = model.get_parameter("layers.0.weight").requires_grad_(False)
    if other is None:
        nn.init.constant_(frozen, 0.25)
    return model


def build_data(args: Args, split: str) -> list[Tensor]:
    return [torch.linspace(0.0, index + 1.0, 3) for index in range(8)]


def loss(model: Two, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - 1.0).square().sum(), len(batch)
