"""Tiny models with sizes that divide by nothing: 7, 15, 3, 17. Each one is made from a seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """`build()` with its random numbers drawn from `seed`; the global stream is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class OddNet(nn.Module):
    """7 -> 15 -> 3 -> 17 with a norm in the middle: parameter sizes 105, 15, 15, 15, 45, 3, 51, 17."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 15)
        self.norm = nn.LayerNorm(15)
        self.down = nn.Linear(15, 3)
        self.head = nn.Linear(3, 17)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (tokens, 17) of `x` (tokens, 7), computed in the parameters' dtype."""
        hidden: Tensor = self.norm(torch.tanh(self.up(x.to(self.up.weight.dtype))))
        return self.head(torch.tanh(self.down(hidden)))  # type: ignore[no-any-return]


class MixedNet(OddNet):
    """OddNet with bf16 linears and a float32 norm, run in float32."""

    def __init__(self) -> None:
        super().__init__()
        for linear in (self.up, self.down, self.head):
            linear.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (tokens, 17) of `x` (tokens, 7)."""
        hidden = self.norm(torch.tanh(_linear(self.up, x)))
        return _linear(self.head, torch.tanh(_linear(self.down, hidden)))


class TiedNet(nn.Module):
    """An embedding of 17 rows and 3 columns that is also the head: one Parameter under two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(17, 3)
        self.mid = nn.Linear(3, 3)
        self.head = nn.Linear(3, 17, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (tokens, 17) of token numbers (tokens,)."""
        return self.head(torch.tanh(self.mid(self.emb(tokens))))  # type: ignore[no-any-return]


class OddShapes(nn.Module):
    """What flat buffers are tried with: 0-dim, non-contiguous, one element, 257 elements, frozen, unused, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.one = nn.Parameter(torch.randn(1))
        self.long = nn.Parameter(torch.randn(257))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.frozen = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Scalars(nn.Module):
    """TOY and TOY-MOE: one float32 parameter of one element per name, starting at `value`."""

    def __init__(self, *names: str, value: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((1,), value, dtype=dtype)))


class Vectors(nn.Module):
    """One parameter per name with the given shape, filled with `value`, in the order of the mapping."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], value: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, value, dtype=dtype)))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.float(), layer.bias.float())


def token_batch(seed: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs (tokens, 7) and targets (tokens,) in 0..16 for OddNet and MixedNet; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 7, generator=generator), torch.randint(0, 17, (tokens,), generator=generator)


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The summed cross entropy of a token batch, in float32."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float(), targets, reduction="sum")


def push(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Run a backward whose gradients are exactly `gradients` (by path): the loss is the sum of parameter x gradient.

    A path that is not in the mapping gets none. Through autograd, so that hooks see what a real backward shows them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    terms = [(parameters[path] * value.to(parameters[path].dtype)).sum() for path, value in gradients.items()]
    if terms:
        torch.autograd.backward(torch.stack([term.float() for term in terms]).sum())


def feed(model: nn.Module, name: str, micro_batches: Sequence[Sequence[float]], scale: float = 1.0) -> int:
    """One backward per micro-batch of TOY tokens (a token x has the loss w * x); returns how many tokens there were."""
    for tokens in micro_batches:
        torch.autograd.backward((model.get_parameter(name) * torch.tensor(tokens)).sum() * scale)
    return sum(len(tokens) for tokens in micro_batches)
