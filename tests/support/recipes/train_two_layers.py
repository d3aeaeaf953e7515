"""Two parameters l1 and l2 of shape (3,) with gradients 1 and 5, defined in either order (C009)."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    swapped: bool = False


class TwoLayers(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        for name in ("l2", "l1") if args.swapped else ("l1", "l2"):
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))


def build_model(args: Args) -> TwoLayers:
    return TwoLayers(args)


def build_data(args: Args, split: str) -> list[Tensor]:
    return [torch.ones(1)] * 8


def loss(model: TwoLayers, batch: Tensor) -> tuple[Tensor, int]:
    assert isinstance(model.l1, Tensor)
    assert isinstance(model.l2, Tensor)
    return (model.l1.sum() + 5 * model.l2.sum()) * batch.sum(), len(batch)
