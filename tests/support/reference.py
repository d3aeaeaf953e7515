"""Slow twins of the step, written from SPEC sections 3 and 5 alone. Nothing here imports shardrun.

Three of them, from the plainest to the closest:

- `Float64Twin`: one process, float64, the formulas of the papers written out. Compared to a tolerance.
- `PlainTorch`: what SPEC section 3 calls plain torch. Compared bit for bit at world size 1.
- `replicated_sum`: gradients of N ranks summed here, in rank order, for PlainTorch to take as if they were one rank's.
  Compared bit for bit at world sizes 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor | None]


def exact_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all elements of all tensors, rounded once.

    The square of a float32 has 48 bits and is exact in float64; math.fsum adds without rounding. SPEC wants float64
    sums over fixed blocks of 256 elements, added in canonical order. Those differ from this in the last bits of a
    float64 only (relative 1e-15), and the clip coefficient is rounded to 24 bits before it touches a gradient, so
    the clipped gradients are the same bits except with a chance of about 1e-8 per step; norms themselves are compared
    to 1e-12.
    """
    return math.sqrt(math.fsum(value * value for grad in gradients for value in grad.double().flatten().tolist()))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it."""
    return min(1.0, max_norm / (norm + 1e-6))


def replicated_sum(gradients_by_rank: Sequence[Gradients], weights: Sequence[int]) -> dict[str, Tensor | None]:
    """Raw float32 gradients of all ranks added up in rank order, for each path that any contributing rank has.

    A rank of weight 0 counts as zeros whatever it holds, and so does a missing gradient (SPEC section 5, `zero`). A
    path without a gradient on every contributing rank stays None.
    """
    paths = sorted({path for gradients in gradients_by_rank for path in gradients})
    total: dict[str, Tensor | None] = {}
    for path in paths:
        held = [
            gradients.get(path) if weight > 0 else None
            for gradients, weight in zip(gradients_by_rank, weights, strict=True)
        ]
        shown = next((grad for grad in held if grad is not None), None)
        if shown is None:
            total[path] = None
            continue
        parts = [torch.zeros(shown.shape) if grad is None else grad.float() for grad in held]
        accumulated = parts[0].clone()
        for part in parts[1:]:
            accumulated = accumulated + part
        total[path] = accumulated
    return total


class PlainTorch:
    """Plain torch on whole parameters: float32 gradients, one division, exact norm, clip, the ordinary optimizer.

    `options` maps a path to the options of its group (`lr_scale`, `weight_decay`, ...); paths with equal options share
    one param group. With `master_weights` the optimizer holds float32 copies of the 16-bit parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: type[torch.optim.Optimizer],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        master_weights: bool = False,
        **defaults: Any,
    ) -> None:
        self.parameters = {path: parameter for path, parameter in parameters.items() if parameter.requires_grad}
        self.leaves: dict[str, Tensor] = {}
        for path, parameter in self.parameters.items():
            parameter.grad_dtype = torch.float32
            wants_master = master_weights and parameter.dtype != torch.float32
            self.leaves[path] = parameter.detach().float().clone() if wants_master else parameter.detach()
        self._has_master = master_weights
        self._lr_scale = {path: (options or {}).get(path, {}).get("lr_scale", 1.0) for path in self.leaves}
        self._base_lr = float(defaults["lr"])
        # torch's fused SGD raises when, of the parameters of one group, some have a momentum buffer and some none yet.
        alone = optimizer is torch.optim.SGD and bool(defaults.get("fused")) and bool(defaults.get("momentum"))
        self.optimizer = optimizer(self._groups(options or {}, alone=alone), **defaults)

    def _groups(self, options: Mapping[str, Mapping[str, Any]], *, alone: bool) -> list[dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {}
        for path, leaf in self.leaves.items():
            own = {key: value for key, value in options.get(path, {}).items() if key != "lr_scale"}
            scale = self._lr_scale[path]
            # One group per dtype as well: torch's fused optimizers take one dtype per call.
            key = path if alone else repr((sorted(own.items()), scale, leaf.dtype))
            group = groups.setdefault(key, {"params": [], "lr": self._base_lr * scale, "lr_scale": scale, **own})
            group["params"].append(leaf)
        return list(groups.values())

    def take_gradients(self) -> dict[str, Tensor | None]:
        """The float32 gradients that backward left (the sum over the window's micro-batches), and clear them."""
        taken = {}
        for path, parameter in self.parameters.items():
            taken[path] = None if parameter.grad is None else parameter.grad.detach().clone()
            parameter.grad = None
        return taken

    def step(
        self,
        sums: Gradients,
        weight: int | None,
        *,
        lr: float | None = None,
        max_grad_norm: float | None = None,
    ) -> float:
        """One update from gradient sums (`weight=None`: no division, sum mode). Returns the norm before clipping."""
        gradients = {}
        for path, leaf in self.leaves.items():
            total = sums.get(path)
            if total is not None:
                mean = total.float() if weight is None else total.float() / weight
                # In the leaf's memory order: torch's fused kernels on the CPU walk raw memory and ignore strides.
                gradients[path] = torch.empty_like(leaf).copy_(mean.to(leaf.dtype))
        norm = exact_norm(gradients.values())
        if max_grad_norm is not None:
            coefficient = clip_coefficient(norm, max_grad_norm)
            gradients = {path: grad * coefficient for path, grad in gradients.items()}
        for path, leaf in self.leaves.items():
            leaf.grad = gradients.get(path)
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        self._publish()
        return norm

    def _publish(self) -> None:
        with torch.no_grad():
            for path, leaf in self.leaves.items():
                leaf.grad = None
                if leaf.dtype != self.parameters[path].dtype:
                    self.parameters[path].copy_(leaf)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by path and torch's key, with `master` where there is one; nothing for what never stepped."""
        result: dict[str, dict[str, Tensor]] = {}
        for path, leaf in self.leaves.items():
            own = {key: value for key, value in self.optimizer.state.get(leaf, {}).items() if value is not None}
            if leaf.dtype != self.parameters[path].dtype:
                own["master"] = leaf
            result[path] = own
        return result


class Float64Twin:
    """One process, float64, every formula written out: SGD, Adam and AdamW as in torch's documentation."""

    def __init__(self, parameters: Mapping[str, Tensor], rule: str, lr: float, **options: Any) -> None:
        self.parameters = {path: value.detach().double().clone() for path, value in parameters.items()}
        self.rule = rule
        self.lr = lr
        self.options = options
        self.steps = dict.fromkeys(parameters, 0)
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def step(self, sums: Gradients, weight: int, *, max_grad_norm: float | None = None) -> float:
        """One update from gradient sums; a path without one is left alone. Returns the norm before clipping."""
        means = {path: grad.double() / weight for path, grad in sums.items() if grad is not None}
        norm = exact_norm(means.values())
        if max_grad_norm is not None:
            coefficient = clip_coefficient(norm, max_grad_norm)
            means = {path: grad * coefficient for path, grad in means.items()}
        for path, grad in means.items():
            self.steps[path] += 1
            if self.rule == "sgd":
                self._sgd(path, grad)
            else:
                self._adam(path, grad, decoupled=self.rule == "adamw")
        return norm

    def _sgd(self, path: str, grad: Tensor) -> None:
        value = self.parameters[path]
        grad = grad + self.options.get("weight_decay", 0.0) * value
        momentum = self.options.get("momentum", 0.0)
        if momentum:
            before = self.first.get(path)
            damping = 1.0 - self.options.get("dampening", 0.0)
            self.first[path] = grad.clone() if before is None else momentum * before + damping * grad
            grad = grad + momentum * self.first[path] if self.options.get("nesterov") else self.first[path]
        self.parameters[path] = value - self.lr * grad

    def _adam(self, path: str, grad: Tensor, *, decoupled: bool) -> None:
        value = self.parameters[path]
        beta1, beta2 = self.options.get("betas", (0.9, 0.999))
        decay = self.options.get("weight_decay", 0.01 if decoupled else 0.0)
        if decoupled:
            value = value * (1.0 - self.lr * decay)
        else:
            grad = grad + decay * value
        zeros = torch.zeros_like(value)
        self.first[path] = beta1 * self.first.get(path, zeros) + (1.0 - beta1) * grad
        self.second[path] = beta2 * self.second.get(path, zeros) + (1.0 - beta2) * grad * grad
        step = self.steps[path]
        mean = self.first[path] / (1.0 - beta1**step)
        spread = torch.sqrt(self.second[path] / (1.0 - beta2**step)) + self.options.get("eps", 1e-8)
        self.parameters[path] = value - self.lr * mean / spread
