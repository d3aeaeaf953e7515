"""The parameters of a Llama 3 of 70 billion, and nothing that computes; with `reads_values` it needs their values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = 80
    width: int = 8192
    narrow: int = 1024
    hidden: int = 28672
    vocabulary: int = 128256
    reads_values: bool = False


class Layer(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(args.width, args.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(args.width, args.narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(args.width, args.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(args.hidden, args.width, bias=False)
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(args.width) for _ in range(2))


class Llama(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        if args.reads_values:
            self.scale = float(self.head.weight.std().item())


def build_model(args: Args) -> nn.Module:
    return Llama(args)


def build_data(args: Args, split: str) -> list[Tensor]:
    raise AssertionError("a plan needs no data")


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    raise AssertionError("a plan computes nothing")
