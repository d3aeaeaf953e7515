"""A net with what models in the wild have: a shared batch norm, a frozen body, tied weights; and hooks that fail."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from shardrun.run.recipe import World


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    frozen: bool = False  # the body is not trained and its norm keeps its statistics, as the recipe says
    val: bool = True  # false: there is no such split
    nan_rank: int | None = None  # this rank counts nothing, and its loss is NaN
    fault: str = ""  # "on_save" or "metrics": the hook that raises, on rank 0


class Net(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Linear(3, 4, bias=False)
        norm = nn.BatchNorm1d(4)
        self.norm_b, self.norm_a = norm, norm  # one module, the names not in sorted order
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm_a(self.embed(x.to(self.embed.weight.dtype)))
        result: Tensor = self.out((hidden + self.head(x.to(self.head.weight.dtype))).to(self.out.weight.dtype))
        return result.float()


_world = World(0, 1)
_args = Args()


def build_model(args: Args, world: World) -> Net:
    global _world, _args
    _world, _args = world, args
    model = Net(args)
    if args.frozen:
        for module in (model.embed, model.norm_a):
            module.requires_grad_(False)
        model.norm_a.eval()
    return model


def build_data(args: Args, split: str) -> list[Tensor]:
    if split == "val" and not args.val:
        raise FileNotFoundError("no such file: val.bin")
    return [torch.linspace(-1.0, index + 1.0, 3) for index in range(8)]


def loss(model: Net, batch: Tensor, world: World) -> tuple[Tensor, int]:
    squared = (model(batch) - 1.0).square().sum()
    if world.rank == model.args.nan_rank:
        return squared * float("nan"), 0
    return squared, len(batch)


def metrics(loss: float, weight: int) -> dict[str, float]:
    if _args.fault == "metrics" and _world.rank == 0:
        raise ValueError("no metric today")
    return {"double": 2 * loss}


def on_save(model: nn.Module, folder: Path) -> None:
    if _args.fault == "on_save":
        raise ValueError("no export today")
    (folder / "saved").touch()
