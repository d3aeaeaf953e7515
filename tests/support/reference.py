"""Slow twins of the step, written from SPEC sections 3 and 5 alone. Nothing here imports shardrun.

What a step must decide, and three ways to compute what it must leave behind, from the plainest to the closest:

- `judge`: from the raw local gradients of all ranks: who is refused and blamed, the denominators, what is absent.
- `Float64Twin`: one process, float64, the formulas of torch's documentation written out. Compared to a tolerance.
- `PlainTorch`: what SPEC section 3 calls plain torch. Compared bit for bit at world size 1.
- `replicated_sum`: gradients of N ranks summed here, in rank order, for PlainTorch to take as if they were one rank's.
  Compared bit for bit at world sizes 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


# ---- what a step decides ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one rank brings to the step of one session."""

    weight: int
    """Mean: samples or tokens in its loss sum. Sum: 1 if it is active, else 0."""
    gradients: Gradients
    """Path -> the raw local gradient of the loss sum, None or left out where there is none."""


@dataclass(frozen=True)
class Part:
    """One session that takes part in a step."""

    paths: Sequence[str]
    """Its selected trainable parameters, each tensor once."""
    mode: str
    """mean or sum."""
    shares: Mapping[int, Share]
    """Rank of the parent -> what it brings, for the members of the session's group, in rank order."""

    @property
    def contributing(self) -> dict[int, Share]:
        """The shares that count: whose weight is above 0."""
        return {rank: share for rank, share in self.shares.items() if share.weight > 0}

    def sums(self) -> dict[str, Tensor | None]:
        """Float32 sums in rank order; None where no contributing rank has a gradient."""
        held = [{path: share.gradients.get(path) for path in self.paths} for share in self.shares.values()]
        return replicated_sum(held, [share.weight for share in self.shares.values()])

    def magnitudes(self) -> dict[str, Tensor]:
        """Sums of the absolute values: how much there was to cancel."""
        held: dict[str, Tensor] = {}
        for share in self.contributing.values():
            for path in self.paths:
                grad = share.gradients.get(path)
                if grad is not None:
                    held[path] = held.get(path, torch.zeros(grad.shape, dtype=torch.float64)) + grad.double().abs()
        return held


@dataclass(frozen=True)
class Verdict:
    """What all ranks must conclude from what all ranks show. The tuples have one entry per part."""

    refusal: str | None
    """None, or why nothing may happen: missing, empty, non-finite."""
    blamed: tuple[tuple[int, str], ...]
    """Rank and path of everything that is missing or not finite."""
    global_weights: tuple[int, ...]
    """Exact denominators of means, numbers of active ranks of sums."""
    divisors: tuple[int | None, ...]
    """What sums are divided by; None in sum mode."""
    absent: tuple[tuple[str, ...], ...]
    """Paths without a gradient on every contributing rank: left alone."""


def judge(parts: Sequence[Part], missing: str, denominator: int) -> Verdict:
    """SPEC section 5, phases 2 to 5, for all sessions of one step together.

    `missing` is the policy, `denominator` the weight summed over the parent (a session stepping alone: over its group).
    """
    lacking = tuple(
        (rank, path)
        for part in parts
        for rank, share in part.contributing.items()
        for path in part.paths
        if share.gradients.get(path) is None
    )
    sums = [part.sums() for part in parts]
    absent = tuple(tuple(path for path, total in held.items() if total is None) for held in sums)
    bad = any(total is not None and not total.isfinite().all() for held in sums for total in held.values())
    refusal: str | None = None
    blamed: tuple[tuple[int, str], ...] = ()
    if missing == "error" and lacking:
        refusal, blamed = "missing", lacking
    elif denominator == 0 and any(part.mode == "mean" for part in parts):
        refusal = "empty"
    elif bad:
        refusal, blamed = "non-finite", tuple(_non_finite(parts))
    return Verdict(
        refusal,
        blamed,
        tuple(denominator if part.mode == "mean" else len(part.contributing) for part in parts),
        tuple(denominator if part.mode == "mean" else None for part in parts),
        absent,
    )


def _non_finite(parts: Sequence[Part]) -> Iterable[tuple[int, str]]:
    for part in parts:
        for rank, share in part.contributing.items():
            for path in part.paths:
                grad = share.gradients.get(path)
                if grad is not None and not grad.isfinite().all():
                    yield rank, path


class Twin(Protocol):
    """What the optimizers of the reference have in common."""

    def reduced(self, sums: Gradients, divisor: int | None) -> dict[str, Tensor]: ...

    def update(self, gradients: Mapping[str, Tensor], coefficient: float = 1.0, lr: float | None = None) -> None: ...


def joint_step(
    twins: Sequence[Twin],
    sums: Sequence[Gradients],
    divisors: Sequence[int | None],
    *,
    lr: float | Sequence[float | None] | None = None,
    max_grad_norm: float | None = None,
) -> float:
    """One update of several sessions, clipped by one norm in which every element counts once; returns the norm.

    `lr`: the base rate of this step, of all or of each; None: the one that a twin was made with.
    """
    rates = lr if isinstance(lr, Sequence) else [lr] * len(twins)
    reduced = [twin.reduced(own, by) for twin, own, by in zip(twins, sums, divisors, strict=True)]
    norm = exact_norm(grad for gradients in reduced for grad in gradients.values())
    coefficient = 1.0 if max_grad_norm is None else clip_coefficient(norm, max_grad_norm)
    for twin, gradients, rate in zip(twins, reduced, rates, strict=True):
        twin.update(gradients, coefficient, rate)
    return norm


# ---- plain torch, to the last bit ---------------------------------------------------------------------------------


class PlainTorch:
    """Plain torch on whole parameters: float32 gradients, one division, exact norm, clip, the ordinary optimizer.

    `options` maps a path to the options of its group (`lr_scale`, `weight_decay`, ...); paths with equal options share
    one param group. With `master_weights` the optimizer holds float32 copies of the 16-bit parameters; with
    `round_gradients` it sees their gradients rounded to the parameter's dtype all the same.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: type[torch.optim.Optimizer],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        master_weights: bool = False,
        round_gradients: bool = False,
        **defaults: Any,
    ) -> None:
        self.parameters = {path: parameter for path, parameter in parameters.items() if parameter.requires_grad}
        self.leaves: dict[str, Tensor] = {}
        for path, parameter in self.parameters.items():
            parameter.grad_dtype = torch.float32
            wants_master = master_weights and parameter.dtype != torch.float32
            self.leaves[path] = parameter.detach().float().clone() if wants_master else parameter.detach()
        self._round_gradients = round_gradients
        self._lr_scale = {path: (options or {}).get(path, {}).get("lr_scale", 1.0) for path in self.leaves}
        self._base_lr = float(defaults["lr"])
        # torch's fused SGD raises when, of the parameters of one group, some have a momentum buffer and some none yet.
        momenta = [defaults.get("momentum"), *(own.get("momentum") for own in (options or {}).values())]
        alone = optimizer is torch.optim.SGD and bool(defaults.get("fused")) and any(momenta)
        groups = self._groups(options or {}, alone=alone)
        # torch wants at least one parameter; a session without a trainable one is valid all the same.
        self.optimizer = optimizer(groups, **defaults) if groups else None

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

    def reduced(self, sums: Gradients, divisor: int | None) -> dict[str, Tensor]:
        """Means (no division without a divisor) of what there is, in the dtype that the optimizer sees."""
        gradients = {}
        for path, leaf in self.leaves.items():
            total = sums.get(path)
            if total is not None:
                mean = total.float() if divisor is None else total.float() / divisor
                if self._round_gradients:
                    mean = mean.to(self.parameters[path].dtype)
                # In the leaf's memory order: torch's fused kernels on the CPU walk raw memory and ignore strides.
                gradients[path] = torch.empty_like(leaf).copy_(mean.to(leaf.dtype))
        return gradients

    def update(self, gradients: Mapping[str, Tensor], coefficient: float = 1.0, lr: float | None = None) -> None:
        """Let the ordinary optimizer step with `gradients` times `coefficient`; what has none is left alone.

        `lr` is the base rate of this one step.
        """
        if self.optimizer is None:
            return
        for path, leaf in self.leaves.items():
            grad = gradients.get(path)
            leaf.grad = grad * coefficient if grad is not None and coefficient < 1.0 else grad
        for group in self.optimizer.param_groups:
            group["lr"] = (self._base_lr if lr is None else lr) * group["lr_scale"]
        self.optimizer.step()
        self._publish()

    def step(
        self, sums: Gradients, weight: int | None, *, lr: float | None = None, max_grad_norm: float | None = None
    ) -> float:
        """One update from gradient sums (`weight=None`: no division, sum mode). Returns the norm before clipping."""
        return joint_step([self], [sums], [weight], lr=lr, max_grad_norm=max_grad_norm)

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
            state = {} if self.optimizer is None else self.optimizer.state.get(leaf, {})
            own = {key: value for key, value in state.items() if value is not None}
            if leaf.dtype != self.parameters[path].dtype:
                own["master"] = leaf
            result[path] = own
        return result


# ---- float64, every formula written out ---------------------------------------------------------------------------

State = dict[str, Any]
Options = Mapping[str, Any]
Formula = Callable[[Tensor, Tensor, State, float, Options], Tensor]
"""(value, gradient, state, rate, options) -> the new value; `state` has the number of this step under "step"."""


class Float64Twin:
    """One process, float64: an optimizer of torch.optim by its formulas (`FORMULAS`), named in lower case.

    `lr` and `options` as torch has them, left out ones have torch's defaults; `groups` maps a path to options of its
    own, with `lr_scale`. `fragile` marks, per path, elements whose gradient was at some step the small difference of
    large terms (less than `cancelled` of them): float32 keeps no digits of those, so nobody can be held to them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rule: str,
        lr: float,
        *,
        groups: Mapping[str, Options] | None = None,
        cancelled: float = 1e-4,
        **options: Any,
    ) -> None:
        self.parameters = {path: value.detach().double().clone() for path, value in parameters.items()}
        self.lr = lr
        self._formula, defaults = FORMULAS[rule]
        self._lr_scale = {path: (groups or {}).get(path, {}).get("lr_scale", 1.0) for path in self.parameters}
        self._options = {}
        for path in self.parameters:
            given = {**options, **(groups or {}).get(path, {})}
            own = {key: value for key, value in given.items() if key not in ("lr_scale", "fused", "foreach")}
            assert set(own) <= {*defaults, "maximize"}, f"{rule} has no {sorted(set(own) - {*defaults})}"
            self._options[path] = {"maximize": False, **defaults, **own}
        self.state: dict[str, State] = {}
        self.travelled = {path: torch.zeros_like(value) for path, value in self.parameters.items()}
        """How far each element has moved, there and back counted: the scale of rounding errors."""
        self.fragile = {path: torch.zeros_like(value, dtype=torch.bool) for path, value in self.parameters.items()}
        self._cancelled = cancelled
        self._magnitudes: dict[str, Tensor] = {}

    @property
    def steps(self) -> dict[str, int]:
        """How often each parameter was stepped."""
        return {path: self.state.get(path, {}).get("step", 0) for path in self.parameters}

    def reduced(self, sums: Gradients, divisor: int | None) -> dict[str, Tensor]:
        """Means (no division without a divisor) of what there is."""
        held = {path: sums[path] for path in self.parameters if sums.get(path) is not None}
        return {path: total.double() / (divisor or 1) for path, total in held.items() if total is not None}

    def note_magnitudes(self, magnitudes: Mapping[str, Tensor], divisor: int | None) -> None:
        """Before `update`: sums of absolute values, to know where gradients of ranks (and L2 decay) cancelled."""
        self._magnitudes = {path: value / (divisor or 1) for path, value in magnitudes.items()}

    def update(self, gradients: Mapping[str, Tensor], coefficient: float = 1.0, lr: float | None = None) -> None:
        """One update with `gradients` times `coefficient`; a path without one is left alone."""
        for path, given in gradients.items():
            options, value = self._options[path], self.parameters[path]
            rate = (self.lr if lr is None else lr) * self._lr_scale[path]
            grad = given * (-coefficient if options["maximize"] else coefficient)
            terms = self._magnitudes.get(path, grad.abs()) * coefficient
            decay = options.get("weight_decay", 0.0)
            start = value
            if options.get("decoupled_weight_decay"):
                start = value * (1.0 - rate * decay)
            elif decay:
                grad = grad + decay * value
                terms = terms + decay * value.abs()
            self.fragile[path] |= grad.abs() < self._cancelled * terms
            state = self.state.setdefault(path, {"step": 0})
            state["step"] += 1
            after = self._formula(start, grad, state, rate, options)
            self.travelled[path] += (after - value).abs()
            self.parameters[path] = after
        self._magnitudes = {}

    def step(
        self, sums: Gradients, weight: int | None, *, lr: float | None = None, max_grad_norm: float | None = None
    ) -> float:
        """One update from gradient sums (`weight=None`: sum mode). Returns the norm before clipping."""
        return joint_step([self], [sums], [weight], lr=lr, max_grad_norm=max_grad_norm)


def _sgd(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    if o["momentum"]:
        before = state.get("buffer")
        buffer = grad if before is None else o["momentum"] * before + (1.0 - o["dampening"]) * grad
        state["buffer"] = buffer
        grad = grad + o["momentum"] * buffer if o["nesterov"] else buffer
    return value - lr * grad


def _betas(o: Options) -> tuple[float, float]:
    beta1, beta2 = o["betas"]
    return beta1, beta2


def _moments(grad: Tensor, state: State, o: Options) -> tuple[Tensor, Tensor]:
    """First and second moment of the Adam family, not yet corrected for their start at zero."""
    beta1, beta2 = _betas(o)
    m = state["m"] = beta1 * state.get("m", 0.0) + (1.0 - beta1) * grad
    v = state["v"] = beta2 * state.get("v", 0.0) + (1.0 - beta2) * grad * grad
    return m, v


def _adam(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    beta1, beta2 = _betas(o)
    m, v = _moments(grad, state, o)
    if o["amsgrad"]:
        v = state["v_max"] = torch.maximum(state.get("v_max", torch.zeros_like(v)), v)
    t: int = state["step"]
    spread: Tensor = torch.sqrt(v / (1.0 - beta2**t)) + o["eps"]
    return value - lr * m / (1.0 - beta1**t) / spread


def _nadam(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    beta1, beta2 = _betas(o)
    m, v = _moments(grad, state, o)
    t: int = state["step"]
    now, following = (beta1 * (1.0 - 0.5 * 0.96 ** (k * o["momentum_decay"])) for k in (t, t + 1))
    product = state["mu_product"] = state.get("mu_product", 1.0) * now
    ahead: Tensor = following * m / (1.0 - product * following) + (1.0 - now) * grad / (1.0 - product)
    spread: Tensor = torch.sqrt(v / (1.0 - beta2**t)) + o["eps"]
    return value - lr * ahead / spread


def _radam(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    beta1, beta2 = _betas(o)
    m, v = _moments(grad, state, o)
    t: int = state["step"]
    ahead = m / (1.0 - beta1**t)
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * t * beta2**t / (1.0 - beta2**t)
    if length <= 5.0:
        return value - lr * ahead
    rectified = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    spread: Tensor = torch.sqrt(v) + o["eps"]
    return value - lr * ahead * rectified * math.sqrt(1.0 - beta2**t) / spread


def _adamax(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    beta1, beta2 = _betas(o)
    t: int = state["step"]
    m: Tensor = beta1 * state.get("m", torch.zeros_like(grad)) + (1.0 - beta1) * grad
    u = torch.maximum(beta2 * state.get("u", torch.zeros_like(grad)), grad.abs() + o["eps"])
    state["m"], state["u"] = m, u
    return value - lr * m / (1.0 - beta1**t) / u


def _adagrad(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    total: Tensor = state.get("sum", torch.full_like(grad, o["initial_accumulator_value"])) + grad * grad
    state["sum"] = total
    rate = lr / (1.0 + (state["step"] - 1) * o["lr_decay"])
    moved: Tensor = rate * grad / (torch.sqrt(total) + o["eps"])
    return value - moved


def _adadelta(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    rho, eps = o["rho"], o["eps"]
    v: Tensor = rho * state.get("v", 0.0) + (1.0 - rho) * grad * grad
    u: Tensor = state.get("u", torch.zeros_like(grad))
    delta = torch.sqrt(u + eps) / torch.sqrt(v + eps) * grad
    state["v"], state["u"] = v, rho * u + (1.0 - rho) * delta * delta
    return value - lr * delta


def _rmsprop(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    alpha = o["alpha"]
    spread = state["v"] = alpha * state.get("v", 0.0) + (1.0 - alpha) * grad * grad
    if o["centered"]:
        mean = state["mean"] = alpha * state.get("mean", 0.0) + (1.0 - alpha) * grad
        spread = spread - mean * mean
    update: Tensor = grad / (torch.sqrt(spread) + o["eps"])
    if o["momentum"] > 0:
        update = state["buffer"] = o["momentum"] * state.get("buffer", 0.0) + update
    return value - lr * update


def _rprop(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    """The step sizes start at the rate of the first step; later rates count for nothing, as in torch."""
    (minus, plus), (smallest, largest) = o["etas"], o["step_sizes"]
    agreement = grad * state.get("previous", torch.zeros_like(grad))
    factor = torch.where(agreement > 0, plus, torch.where(agreement < 0, minus, 1.0)).to(grad.dtype)
    size: Tensor = (state.get("size", torch.full_like(grad, lr)) * factor).clamp(smallest, largest)
    grad = torch.where(agreement < 0, 0.0, grad)
    state["size"], state["previous"] = size, grad
    return value - size * torch.sign(grad)


def _asgd(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    """Each step uses the rate that the step before it left behind, the first one `lr`, as in torch."""
    t, eta = state["step"], state.get("eta", lr)
    value = value * (1.0 - o["lambd"] * eta) - eta * grad
    average: Tensor = state.get("average", torch.zeros_like(value))
    state["average"] = average + (value - average) * state.get("mu", 1.0)
    state["eta"] = lr / (1.0 + o["lambd"] * lr * t) ** o["alpha"]
    state["mu"] = 1.0 / max(1.0, t - o["t0"])
    return value


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Roughly U V^T of `matrix` = U S V^T (rows, columns), by the quintic iteration of Muon; singular values end
    anywhere in about 0.7 to 1.2. In the dtype of `matrix`; torch runs it in bfloat16."""
    a, b, c = coefficients
    turned = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if turned else matrix
    x = x / max(math.sqrt(float((x * x).sum())), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


def _muon(value: Tensor, grad: Tensor, state: State, lr: float, o: Options) -> Tensor:
    momentum = o["momentum"]
    # torch averages where its documentation sums; the iteration starts by dividing the scale away.
    buffer: Tensor = momentum * state.get("buffer", 0.0) + (1.0 - momentum) * grad
    state["buffer"] = buffer
    update = momentum * buffer + (1.0 - momentum) * grad if o["nesterov"] else buffer
    rows, columns = value.shape
    by_adamw = o["adjust_lr_fn"] == "match_rms_adamw"
    ratio = 0.2 * math.sqrt(max(rows, columns)) if by_adamw else math.sqrt(max(1.0, rows / columns))
    return value - lr * ratio * newton_schulz(update, o["ns_coefficients"], o["ns_steps"], o["eps"])


_ADAM: Options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False}
_MUON: Options = {
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
    "decoupled_weight_decay": True,
}

FORMULAS: dict[str, tuple[Formula, Options]] = {
    "sgd": (_sgd, {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}),
    "adam": (_adam, {**_ADAM, "amsgrad": False}),
    "adamw": (_adam, {**_ADAM, "amsgrad": False, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "nadam": (_nadam, {**_ADAM, "momentum_decay": 4e-3}),
    "radam": (_radam, _ADAM),
    "adamax": (_adamax, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    "adagrad": (_adagrad, {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}),
    "adadelta": (_adadelta, {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}),
    "rmsprop": (
        _rmsprop,
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    ),
    "rprop": (_rprop, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50)}),
    "asgd": (_asgd, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0}),
    "muon": (_muon, _MUON),
}
"""Name -> how a value (start of the step, decoupled decay done) moves, and torch's own defaults but for the rate."""

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
}
"""torch's own, by the same names."""
