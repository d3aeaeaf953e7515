"""gpt.py with mixture-of-experts layers, whose experts may live on different ranks.

Every token goes to its `top_k` experts, none is dropped (Fedus et al. 2021, Switch Transformers; Gale et al. 2022,
MegaBlocks). Without an axis `experts` in the topology every rank holds all experts and nothing is sent; with one, its
ranks hold equal contiguous parts of them and exchange tokens by all-to-all. Parameter paths, beside those of gpt.py:

    blocks.0.moe.router.weight       blocks.0.moe.experts.0.up.weight   (and .gate.weight, .down.weight)

Experts are numbered over the whole model, so a path means the same tensor on every rank that has it.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Attention, Mlp, build_data, bytes_per_token  # type: ignore[import-not-found]
from gpt import Args as DenseArgs
from pydantic import Field
from torch import Tensor, nn

from shardrun.data.sources import IGNORE

__all__ = ["Args", "build_data", "build_model", "bytes_per_token", "loss"]
AXIS = "experts"


class Args(DenseArgs):  # type: ignore[misc]
    """What `recipe_args` in the config may hold."""

    experts: int = Field(4, ge=1, description="experts of each layer, over all ranks")
    top_k: int = Field(2, ge=1, description="experts that each token goes to")
    balance: float = Field(0.01, ge=0.0, description="weight of the load-balance loss, in nats per token")


class _Exchange(torch.autograd.Function):
    """Rows (sum(sent), width) to the ranks of a group, `sent[r]` of them to rank r; `received[r]` come from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = (sent, received, group)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.way
        return exchange(grads[0], received, sent, group), None, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """`rows` at the ranks for which they are, and the rows for this one, by rank; autograd sends gradients back."""
    arrived: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived


class Moe(nn.Module):
    """Router and this rank's experts, (batch, length, width) -> the same shape.

    `group` has `ranks` members that hold all experts together, this one the part number `part`.
    """

    def __init__(self, args: Args, group: Any, ranks: int, part: int) -> None:
        super().__init__()
        self.top_k, self.group, self.ranks = args.top_k, group, ranks
        self.router = nn.Linear(args.width, args.experts, bias=False)
        held = args.experts // ranks
        self.experts = nn.ModuleDict({str(number): Mlp(args) for number in range(part * held, (part + 1) * held)})
        self.load: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        exact = torch.promote_types(tokens.dtype, torch.float32)
        shares = self.router(tokens).softmax(dim=-1, dtype=exact)  # (tokens, experts)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        counts = chosen.flatten().bincount(minlength=shares.shape[1])
        self.load = (counts, shares.sum(dim=0))
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by the rank that has it
        computed = self._compute(tokens[order // self.top_k], counts)
        weighted = computed * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, weighted).view_as(x)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in the order of experts, `counts` (experts,) of each, through them and back."""
        if self.ranks == 1:
            return self._through_experts(rows, counts.tolist())
        sent = counts.view(self.ranks, -1)  # (ranks, experts of each)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        sizes, arriving = sent.sum(dim=1).tolist(), coming.sum(dim=1).tolist()
        arrived = exchange(rows, sizes, arriving, self.group)
        # They come rank by rank, each in the order of experts: put those of one expert together.
        number = torch.arange(coming.shape[1], device=coming.device).repeat(self.ranks)
        order = number.repeat_interleave(coming.flatten()).argsort(stable=True)
        computed = self._through_experts(arrived[order], coming.sum(dim=0).tolist())
        return exchange(computed[order.argsort()], arriving, sizes, self.group)

    def _through_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        """An expert without a row is not called: it has no gradient then, and is left alone by the step."""
        pieces = zip(self.experts.values(), rows.split_with_sizes(counts), strict=True)
        parts = [expert(piece) for expert, piece in pieces if len(piece)]
        # A rank without any row is a part of the exchange all the same, in backward too.
        return torch.cat(parts) if parts else rows * 1.0

    def balance_loss(self) -> Tensor:
        """Experts times the sum over them of (share of tokens) x (mean of the router); a sum over tokens, too."""
        assert self.load is not None
        counts, shares = self.load
        return len(counts) * (counts / counts.sum().clamp(min=1) * shares).sum()


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, args: Args, *place: Any) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(args.width, eps=1e-6)
        self.attn = Attention(args)
        self.mlp_norm = nn.RMSNorm(args.width, eps=1e-6)
        self.moe = Moe(args, *place)
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.attn_norm(x)))
        result: Tensor = x + self.drop(self.moe(self.mlp_norm(x)))
        return result


class MoeGPT(GPT):  # type: ignore[misc]
    """gpt.py's model with other blocks: tokens (batch, length) int64 -> logits (batch, length, 256)."""

    def __init__(self, args: Args, group: Any = None, ranks: int = 1, part: int = 0) -> None:
        super().__init__(args)
        self.balance = args.balance
        self.blocks = nn.ModuleList(Block(args, group, ranks, part) for _ in range(args.layers))


def build_model(args: Args, world: Any) -> MoeGPT:
    """This rank's part of the model. Every parameter is drawn by its own name, so that all placements start alike."""
    ranks = world.axes.get(AXIS, 1)
    if args.experts % ranks or args.top_k > args.experts:
        raise ValueError(f"{args.experts} experts on {ranks} ranks, {args.top_k} of them for each token, cannot be")
    model = MoeGPT(args, world.group(AXIS), ranks, world.coordinates.get(AXIS, 0))
    for path, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter.is_meta:
            continue  # the norms start at one
        generator = torch.Generator().manual_seed((torch.initial_seed() + zlib.crc32(path.encode())) % 2**63)
        residual = path.endswith(("attn.out.weight", "down.weight"))
        nn.init.normal_(parameter, std=0.02 / (2 * args.layers) ** 0.5 if residual else 0.02, generator=generator)
    return model


def loss(model: MoeGPT, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropy over the labelled tokens (in nats), in training with the balance losses; how many."""
    inputs, labels = batch
    logits = model(inputs).flatten(0, 1).float()
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    if model.training and model.balance:
        total = total + model.balance * sum(m.balance_loss() for m in model.modules() if isinstance(m, Moe))
    return total, (labels != IGNORE).sum()
