"""A tiny network with everything that a resume can lose: dropout, running statistics, a counter, random data."""

from __future__ import annotations

import os
import random
import time
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from shardrun.run.recipe import World


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = 26
    dropout: float = 0.25
    slow_s: float = 0.0
    statistics: bool = True
    fault: Literal["none", "attribute", "data", "chance", "rank"] = "none"


class Net(nn.Module):
    running_mean: Tensor
    recent: Tensor
    batches: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.first = nn.Linear(7, 15)
        self.drop = nn.Dropout(args.dropout)
        self.second = nn.Linear(15, 3)
        self.register_buffer("running_mean", torch.zeros(15))
        self.register_buffer("recent", torch.zeros(3), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.calls = 0  # no checkpoint holds a plain attribute

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype))
        if self.training and self.args.statistics:
            with torch.no_grad():
                self.running_mean.lerp_(hidden.mean(0).to(self.running_mean.dtype), 0.1)
                self.batches += 1
        logits: Tensor = self.second(self.drop(torch.tanh(hidden - self.running_mean.to(hidden.dtype))))
        if self.training:
            with torch.no_grad():
                self.recent.copy_(logits.mean(0))
            if self.args.fault == "attribute":
                self.calls += 1
                logits = logits * (1.0 + 0.01 * self.calls)
        return logits


class Noisy:
    """Items that draw random numbers, and with the fault a count of how often this very object was asked."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.asked = 0

    def __len__(self) -> int:
        return self.args.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        noise = random.random() + float(np.random.random()) + torch.rand(())
        if self.args.fault == "data":
            noise = noise + 0.1 * self.asked
        if self.args.fault == "chance":
            noise = noise + int.from_bytes(os.urandom(2), "little") / 65536
        return torch.linspace(-1.0, 1.0, 7) * (index + 1) / len(self) + 0.1 * noise, torch.tensor(index % 3)


def build_model(args: Args) -> Net:
    return Net(args)


def build_data(args: Args, split: str) -> Noisy:
    return Noisy(args if split == "train" else args.model_copy(update={"samples": 5}))


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def loss(model: Net, batch: tuple[Tensor, Tensor], world: World) -> tuple[Tensor, int]:
    inputs, labels = batch
    time.sleep(model.args.slow_s)
    if model.args.fault == "rank" and world.rank == world.world_size - 1 and int(model.batches) == 9:
        raise ValueError("bad label 7")
    return F.cross_entropy(model(inputs).float(), labels, reduction="sum"), labels.numel()
