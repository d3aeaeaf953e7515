"""A linear model that can go wrong on one rank at one step: what the launcher's cases need."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import Dataset

_calls = 0


class Args(BaseModel):
    """`fault` happens on `rank` in its loss number `at` (one loss per step where the batches say so)."""

    fault: str = ""
    rank: int = 1
    at: int = 2
    step_s: float = 0.0
    save_s: float = 0.0


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a plane."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index % 7 - 3.0, index % 5 - 2.0, 1.0])
        return x, x.sum()


class Model(nn.Module):
    """One linear map."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.squeeze(-1)


def build_model(args: Args) -> nn.Module:
    """The model."""
    return Model(args)


def build_data(args: Args, split: str) -> Points:
    """The same points for both splits."""
    return Points()


def loss(model: Model, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Squared distance, after the fault if it is due."""
    global _calls
    _calls += 1
    args = model.args
    time.sleep(args.step_s)
    if int(os.environ.get("RANK", "0")) == args.rank and _calls == args.at:
        _go_wrong(args.fault)
    if args.fault == "print":
        print(f"user print {_calls}", flush=True)
        warnings.warn("odd value", stacklevel=1)
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(y)


def on_save(model: Model, folder: Path) -> None:
    """Makes a save last."""
    if model.args.save_s:
        print("saving", flush=True)
        time.sleep(model.args.save_s)


def _go_wrong(fault: str) -> None:
    if fault == "raise":
        raise ValueError("bad label 7")
    if fault == "exit3":
        sys.exit(3)
    if fault == "exit_text":
        sys.exit("no more data")
    if fault == "os_exit0":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "memory":
        torch.empty(1 << 60)
    if fault == "abort":
        os.abort()
    if fault == "sleep":
        time.sleep(60)
    if fault == "warn":
        warnings.warn("odd value", stacklevel=1)
