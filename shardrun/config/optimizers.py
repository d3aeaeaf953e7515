"""The optimizer section: one model per optimizer, so that a key of another one is an unknown key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag

from shardrun.config.elementwise import (
    AdadeltaOptionGroup,
    AdadeltaOptions,
    AdagradOptionGroup,
    AdagradOptions,
    AdamaxOptions,
    AdamOptionGroup,
    AdamOptions,
    AdamWOptions,
    ASGDOptions,
    Matched,
    NAdamOptions,
    OptionGroup,
    RAdamOptions,
    RMSpropOptionGroup,
    RMSpropOptions,
    RpropOptionGroup,
    RpropOptions,
    SGDOptions,
)
from shardrun.config.matrices import Factory, Muon
from shardrun.config.section import NotNegative, Section

_Group = TypeVar("_Group", bound=Matched)

_BRING = "bring it in the recipe, and in place of name write factory, kind: matrix and strategy: zero1"
# Not built in: why, and the way out where there is one.
REFUSED = {
    "shampoo": f"shampoo is not in torch.optim; {_BRING}",
    "soap": f"soap is not in torch.optim; {_BRING}",
    "adafactor": f"adafactor keeps row and column averages of whole matrices; {_BRING}",
    "lbfgs": "lbfgs evaluates the loss several times per update and takes dot products over all parameters, which no "
    "step can that ranks agree on beforehand; use adamw or another one",
    "sparseadam": "sparseadam needs sparse gradients, and the ranks reduce dense ones; use adam",
}
FACTORY = "(factory)"
"""Stands for the model of a recipe's own optimizer; no name, so that nobody can write it as one."""


class _Sharded(Section, Generic[_Group]):
    strategy: Literal["zero2", "zero1"] = "zero2"
    """zero2: optimizer state and reduced gradients are cut evenly over the ranks; zero1: a parameter has one owner."""
    lr: NotNegative
    """Base learning rate; the schedule scales it."""
    options: Annotated[tuple[_Group, ...], Field(strict=False)] = ()
    """Options of their own for some parameters; the first match wins."""


class AdamW(_Sharded[AdamOptionGroup], AdamWOptions):
    """torch.optim.AdamW."""


class Adam(_Sharded[AdamOptionGroup], AdamOptions):
    """torch.optim.Adam."""


class SGD(_Sharded[OptionGroup], SGDOptions):
    """torch.optim.SGD."""


class NAdam(_Sharded[AdamOptionGroup], NAdamOptions):
    """torch.optim.NAdam."""


class RAdam(_Sharded[AdamOptionGroup], RAdamOptions):
    """torch.optim.RAdam."""


class Adamax(_Sharded[AdamOptionGroup], AdamaxOptions):
    """torch.optim.Adamax."""


class Adagrad(_Sharded[AdagradOptionGroup], AdagradOptions):
    """torch.optim.Adagrad."""


class Adadelta(_Sharded[AdadeltaOptionGroup], AdadeltaOptions):
    """torch.optim.Adadelta."""


class RMSprop(_Sharded[RMSpropOptionGroup], RMSpropOptions):
    """torch.optim.RMSprop."""


class Rprop(_Sharded[RpropOptionGroup], RpropOptions):
    """torch.optim.Rprop."""


class ASGD(_Sharded[OptionGroup], ASGDOptions):
    """torch.optim.ASGD."""


def chosen(given: Any) -> str | None:
    """The name of the optimizer that a section is about, as it was written or as a model; FACTORY, or None for none."""
    if isinstance(given, Mapping):
        name = given.get("name")
        return FACTORY if "factory" in given else name if isinstance(name, str) else None
    return FACTORY if isinstance(given, Factory) else getattr(given, "name", None)


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[SGD, Tag("sgd")]
    | Annotated[NAdam, Tag("nadam")]
    | Annotated[RAdam, Tag("radam")]
    | Annotated[Adamax, Tag("adamax")]
    | Annotated[Adagrad, Tag("adagrad")]
    | Annotated[Adadelta, Tag("adadelta")]
    | Annotated[RMSprop, Tag("rmsprop")]
    | Annotated[Rprop, Tag("rprop")]
    | Annotated[ASGD, Tag("asgd")]
    | Annotated[Muon, Tag("muon")]
    | Annotated[Factory, Tag(FACTORY)],
    Discriminator(chosen),
]

OPTIMIZERS: dict[str, type[BaseModel]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "nadam": NAdam,
    "radam": RAdam,
    "adamax": Adamax,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "rmsprop": RMSprop,
    "rprop": Rprop,
    "asgd": ASGD,
    "muon": Muon,
}
"""Name -> its model."""
