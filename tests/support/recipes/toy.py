"""TOY of the public cases: one fp32 parameter w of one element, the loss of a token is w * x.

The gradient of a window is the plain mean of the x of all its tokens, so expected values can be written down by hand.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from shardrun.run.recipe import World


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: list[list[float | None]]  # per sample the x of its tokens; null is a token whose label is ignored
    val: list[list[float | None]] = [[1.0]]
    w: float = 0.0
    record: str | None = None  # each rank appends a line per micro-batch to RECORD.rank-N: {"x", "draws", "training"}
    noise: bool = False  # rank r draws r + 1 numbers from python, numpy and torch and adds them to its loss


class Toy(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.w = nn.Parameter(torch.tensor([args.w], dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def build_model(args: Args) -> Toy:
    return Toy(args)


def build_data(args: Args, split: str) -> list[list[float | None]]:
    return args.samples if split == "train" else args.val


def collate(samples: list[list[float | None]]) -> Tensor:
    """All tokens of the micro-batch in a row, (tokens,) float32, NaN where the label is ignored."""
    return torch.tensor([float("nan") if x is None else x for sample in samples for x in sample], dtype=torch.float32)


def loss(model: Toy, batch: Tensor, world: World) -> tuple[Tensor, int]:
    counted = batch[~batch.isnan()]
    draws = draw(world.rank + 1) if model.args.noise else []
    if model.args.record is not None:
        line = {"x": counted.tolist(), "draws": draws, "training": model.training}
        with Path(f"{model.args.record}.rank-{world.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return model(counted).sum() + model.w.sum() * sum(draws), counted.numel()


def draw(count: int) -> list[float]:
    """`count` numbers from each of the streams of this process."""
    return [x for _ in range(count) for x in (random.random(), float(np.random.random()), torch.rand(()).item())]
