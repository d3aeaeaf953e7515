"""The optimizer beside one that takes matrices: it steps the parameters that are left over, or left to it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from shardrun.config.elementwise import (
    AdadeltaOptions,
    AdagradOptions,
    AdamaxOptions,
    AdamOptions,
    AdamWOptions,
    ASGDOptions,
    NAdamOptions,
    RAdamOptions,
    RMSpropOptions,
    RpropOptions,
    SGDOptions,
)
from shardrun.config.section import NotNegative, Patterns, Section


class _Rest(Section):
    match: Patterns = ()
    """Parameters that go to it whatever their shape, such as embeddings and the head: globs over paths, or re:..."""
    lr: NotNegative | None = None
    """Its learning rate, which the schedule scales as well; null: optimizer.lr."""


class RestAdamW(_Rest, AdamWOptions):
    """torch.optim.AdamW, for what the optimizer does not take."""


class RestAdam(_Rest, AdamOptions):
    """torch.optim.Adam, for what the optimizer does not take."""


class RestSGD(_Rest, SGDOptions):
    """torch.optim.SGD, for what the optimizer does not take."""


class RestNAdam(_Rest, NAdamOptions):
    """torch.optim.NAdam, for what the optimizer does not take."""


class RestRAdam(_Rest, RAdamOptions):
    """torch.optim.RAdam, for what the optimizer does not take."""


class RestAdamax(_Rest, AdamaxOptions):
    """torch.optim.Adamax, for what the optimizer does not take."""


class RestAdagrad(_Rest, AdagradOptions):
    """torch.optim.Adagrad, for what the optimizer does not take."""


class RestAdadelta(_Rest, AdadeltaOptions):
    """torch.optim.Adadelta, for what the optimizer does not take."""


class RestRMSprop(_Rest, RMSpropOptions):
    """torch.optim.RMSprop, for what the optimizer does not take."""


class RestRprop(_Rest, RpropOptions):
    """torch.optim.Rprop, for what the optimizer does not take."""


class RestASGD(_Rest, ASGDOptions):
    """torch.optim.ASGD, for what the optimizer does not take."""


Rest = Annotated[
    RestAdamW
    | RestAdam
    | RestSGD
    | RestNAdam
    | RestRAdam
    | RestAdamax
    | RestAdagrad
    | RestAdadelta
    | RestRMSprop
    | RestRprop
    | RestASGD,
    Field(discriminator="name"),
]

RESTS: dict[str, type[BaseModel]] = {
    "adamw": RestAdamW,
    "adam": RestAdam,
    "sgd": RestSGD,
    "nadam": RestNAdam,
    "radam": RestRAdam,
    "adamax": RestAdamax,
    "adagrad": RestAdagrad,
    "adadelta": RestAdadelta,
    "rmsprop": RestRMSprop,
    "rprop": RestRprop,
    "asgd": RestASGD,
}
"""Name -> its model."""
