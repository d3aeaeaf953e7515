"""The network of verify_net with optimizers of its own: sound ones of both kinds, and one whose claim is false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.recipes.verify_net import Args, build_data, build_model, collate, loss

__all__ = ["Adafactor", "Args", "Rows", "build_data", "build_model", "collate", "loss", "normed", "signs"]

Adafactor = torch.optim.Adafactor
no_optimizer = 5


Rule = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]


class Own(torch.optim.Optimizer):
    """Steps every leaf that has a gradient by `rule`, which keeps what it wants in the leaf's state."""

    def __init__(self, params: Any, rule: Rule, **options: Any) -> None:
        self._rule = rule
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for leaf in group["params"]:
                if leaf.grad is not None:
                    self._rule(leaf, leaf.grad, self.state[leaf], group)


def signs(params: Any, lr: float, momentum: float = 0.5) -> Own:
    """Elementwise: the sign of a running average; a plain counter warms the rate up."""
    return Own(params, _sign, lr=lr, momentum=momentum)


def _sign(leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    average = state.setdefault("average", torch.zeros_like(leaf)).lerp_(grad, 1 - group["momentum"])
    leaf.sub_(average.sign(), alpha=group["lr"] * min(1.0, state["count"] / 4))


class Rows(Own):
    """Matrix: every row by its own running size; a number remembers the largest gradient."""

    def __init__(self, params: Any, lr: float, decay: float = 0.5) -> None:
        super().__init__(params, _rows, lr=lr, decay=decay)


def _rows(leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    rows = grad.reshape(grad.shape[0], -1) if grad.dim() else grad.reshape(1, 1)
    size = rows.norm(dim=1, keepdim=True)
    state["size"] = size if "size" not in state else state["size"].lerp(size, 1 - group["decay"])
    state["largest"] = max(state.get("largest", 0.0), float(grad.abs().max()))
    leaf.sub_((rows / (state["size"] + 1e-3 * state["largest"])).view_as(leaf), alpha=group["lr"])


def normed(params: Any, lr: float) -> Own:
    """Declared elementwise in the tests, though it divides by the norm of the whole."""
    return Own(params, _normed, lr=lr)


def _normed(leaf: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    leaf.sub_(grad / grad.norm(), alpha=group["lr"])
