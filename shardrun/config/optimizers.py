"""The optimizer section: one model per optimizer, so that a key of another one is an unknown key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from shardrun.config.section import Betas, Broken, NotNegative, Patterns, Section

_WHOLE_MATRICES = "updates whole matrices and cannot run under zero2, which cuts parameters anywhere"
# Refused by name with the reason; the way out is the same for all.
REFUSED = {
    "muon": f"muon {_WHOLE_MATRICES}",
    "shampoo": f"shampoo {_WHOLE_MATRICES}",
    "soap": f"soap {_WHOLE_MATRICES}",
    "adafactor": "adafactor keeps row and column averages of whole matrices and cannot run under zero2",
    "lbfgs": "lbfgs evaluates the loss several times per update and takes dot products over all parameters",
    "sparseadam": "sparseadam needs sparse gradients, and zero2 reduces dense ones",
}


class OptionGroup(Section):
    """Options of their own for some parameters. The first entry that matches a parameter wins."""

    match: Annotated[Patterns, Field(min_length=1)]
    """Globs over dotted parameter paths, or re:..."""
    weight_decay: NotNegative | None = None
    """In place of the optimizer's weight_decay."""
    lr_scale: NotNegative = 1.0
    """Multiplies the learning rate."""


class AdamOptionGroup(OptionGroup):
    """Options of their own for some parameters, under adam and adamw."""

    betas: Betas | None = None
    """In place of the optimizer's betas."""
    eps: NotNegative | None = None
    """In place of the optimizer's eps."""


class _Optimizer(Section):
    strategy: Literal["zero2"] = "zero2"
    """zero2: optimizer state and reduced gradients are cut evenly over the ranks."""
    lr: NotNegative
    """Base learning rate; the schedule scales it."""
    fused: bool | None = None
    """torch's fused kernel; null: where torch has it."""


class _Adam(_Optimizer):
    betas: Betas = (0.9, 0.999)
    """Decay of the running averages of the gradient and of its square."""
    eps: NotNegative = 1e-8
    """Added to the denominator."""
    amsgrad: bool = False
    """Divide by the largest second moment seen so far."""
    options: Annotated[tuple[AdamOptionGroup, ...], Field(strict=False)] = ()
    """Options of their own for some parameters; the first match wins."""


class AdamW(_Adam):
    """torch.optim.AdamW."""

    name: Literal["adamw"]
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""


class Adam(_Adam):
    """torch.optim.Adam."""

    name: Literal["adam"]
    weight_decay: NotNegative = 0.0
    """L2 penalty, added to the gradient."""


class SGD(_Optimizer):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    weight_decay: NotNegative = 0.0
    """L2 penalty, added to the gradient."""
    momentum: NotNegative = 0.0
    """Share of the last update that is carried on."""
    dampening: NotNegative = 0.0
    """Takes this share off the gradient that enters the momentum."""
    nesterov: bool = False
    """Nesterov momentum."""
    options: Annotated[tuple[OptionGroup, ...], Field(strict=False)] = ()
    """Options of their own for some parameters; the first match wins."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """Nesterov momentum as torch defines it."""
        if given.get("nesterov") is True:
            if given.get("momentum", 0) == 0:
                yield Broken("nesterov", "needs a momentum above 0, and optimizer.momentum is 0")
            if given.get("dampening", 0) != 0:
                yield Broken("nesterov", f"needs no dampening, and optimizer.dampening is {given['dampening']}")


Optimizer = Annotated[AdamW | Adam | SGD, Field(discriminator="name")]
