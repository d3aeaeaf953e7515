"""Options of torch.optim's elementwise classes, with torch's names, defaults and ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from shardrun.config.section import Betas, Broken, Fraction, NotNegative, Patterns, Section

Etas = Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]], Field(strict=False)]
StepSizes = Annotated[tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]], Field(strict=False)]

# ---- of some parameters ----------------------------------------------------------------------------------------------


class Matched(Section):
    """A rate of their own for some parameters. The first entry that matches a parameter wins."""

    match: Annotated[Patterns, Field(min_length=1)]
    """Globs over dotted parameter paths, or re:..."""
    lr_scale: NotNegative = 1.0
    """Multiplies the learning rate."""


class OptionGroup(Matched):
    """Options of their own for some parameters. The first entry that matches a parameter wins."""

    weight_decay: NotNegative | None = None
    """In place of the optimizer's weight_decay."""


class AdamOptionGroup(OptionGroup):
    """Options of their own for some parameters, under adam and its kin."""

    betas: Betas | None = None
    """In place of the optimizer's betas."""
    eps: NotNegative | None = None
    """In place of the optimizer's eps."""


class AdagradOptionGroup(OptionGroup):
    """Options of their own for some parameters, under adagrad."""

    lr_decay: NotNegative | None = None
    """In place of the optimizer's lr_decay."""
    eps: NotNegative | None = None
    """In place of the optimizer's eps."""


class AdadeltaOptionGroup(OptionGroup):
    """Options of their own for some parameters, under adadelta."""

    rho: Fraction | None = None
    """In place of the optimizer's rho."""
    eps: NotNegative | None = None
    """In place of the optimizer's eps."""


class RMSpropOptionGroup(OptionGroup):
    """Options of their own for some parameters, under rmsprop."""

    alpha: NotNegative | None = None
    """In place of the optimizer's alpha."""
    eps: NotNegative | None = None
    """In place of the optimizer's eps."""


class RpropOptionGroup(Matched):
    """Options of their own for some parameters, under rprop."""

    etas: Etas | None = None
    """In place of the optimizer's etas."""
    step_sizes: StepSizes | None = None
    """In place of the optimizer's step_sizes."""


# ---- of all --------------------------------------------------------------------------------------------------------


class _Fused(Section):
    fused: bool | None = None
    """torch's fused kernel; null: where torch has it."""


class _L2(Section):
    weight_decay: NotNegative = 0.0
    """L2 penalty, added to the gradient."""


class _Moments(Section):
    betas: Betas = (0.9, 0.999)
    """Decay of the running averages of the gradient and of its square."""
    eps: NotNegative = 1e-8
    """Added to the denominator."""


class _Decoupled(_L2):
    decoupled_weight_decay: bool = False
    """Take the decay off the parameter instead, as adamw does."""


class _Adam(_Moments, _Fused):
    amsgrad: bool = False
    """Divide by the largest second moment seen so far."""


class AdamWOptions(_Adam):
    """torch.optim.AdamW."""

    name: Literal["adamw"]
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""


class AdamOptions(_Adam, _L2):
    """torch.optim.Adam."""

    name: Literal["adam"]


class SGDOptions(_L2, _Fused):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    momentum: NotNegative = 0.0
    """Share of the last update that is carried on."""
    dampening: NotNegative = 0.0
    """Takes this share off the gradient that enters the momentum."""
    nesterov: bool = False
    """Nesterov momentum."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """Nesterov momentum as torch defines it."""
        if given.get("nesterov") is True:
            if given.get("momentum", 0) == 0:
                yield Broken("nesterov", "needs a momentum above 0, and momentum is 0")
            if given.get("dampening", 0) != 0:
                yield Broken("nesterov", f"needs no dampening, and dampening is {given['dampening']}")


class NAdamOptions(_Moments, _Decoupled):
    """torch.optim.NAdam."""

    name: Literal["nadam"]
    momentum_decay: NotNegative = 4e-3
    """How fast the Nesterov momentum reaches the first of betas."""


class RAdamOptions(_Moments, _Decoupled):
    """torch.optim.RAdam."""

    name: Literal["radam"]


class AdamaxOptions(_Moments, _L2):
    """torch.optim.Adamax."""

    name: Literal["adamax"]


class AdagradOptions(_L2, _Fused):
    """torch.optim.Adagrad."""

    name: Literal["adagrad"]
    lr_decay: NotNegative = 0.0
    """The rate of update t is divided by 1 + (t - 1) * lr_decay."""
    initial_accumulator_value: NotNegative = 0.0
    """Where the sum of squares starts."""
    eps: NotNegative = 1e-10
    """Added to the denominator."""


class AdadeltaOptions(_L2):
    """torch.optim.Adadelta."""

    name: Literal["adadelta"]
    rho: Fraction = 0.9
    """Decay of the running averages of the squares."""
    eps: NotNegative = 1e-6
    """Added to the denominator."""


class RMSpropOptions(_L2):
    """torch.optim.RMSprop."""

    name: Literal["rmsprop"]
    alpha: NotNegative = 0.99
    """Decay of the running average of the square."""
    eps: NotNegative = 1e-8
    """Added to the denominator."""
    momentum: NotNegative = 0.0
    """Share of the last update that is carried on."""
    centered: bool = False
    """Divide by the standard deviation, not by the root mean square."""


class RpropOptions(Section):
    """torch.optim.Rprop; lr is the first step size."""

    name: Literal["rprop"]
    etas: Etas = (0.5, 1.2)
    """Factors of the step size where the sign of the gradient turns, and where it stays."""
    step_sizes: StepSizes = (1e-6, 50.0)
    """Smallest and largest step size."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """Step sizes in order."""
        match given.get("step_sizes"):
            case [int() | float() as least, int() | float() as most] if least > most:
                yield Broken("step_sizes", f"the smallest, {least}, is above the largest, {most}")


class ASGDOptions(_L2):
    """torch.optim.ASGD."""

    name: Literal["asgd"]
    lambd: float = 1e-4
    """Decay term."""
    alpha: float = 0.75
    """Power in which the rate falls."""
    t0: float = 1e6
    """Update from which on the average is taken."""
