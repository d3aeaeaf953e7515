"""Optimizers that need whole tensors: muon, and what a recipe brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shardrun.config.elementwise import Matched, OptionGroup
from shardrun.config.rest import Rest, RestAdamW
from shardrun.config.section import Broken, NotNegative, PlainOptions, Section, rule_error

_WHOLE = "updates whole matrices and cannot run under zero2, which cuts parameters anywhere; use strategy zero1"


def _not_cut(strategy: Any) -> Any:
    if strategy == "zero2":
        raise rule_error(f"muon {_WHOLE}")
    return strategy


class _Matrices(Section):
    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """A rate of the rest that can follow optimizer.lr."""
        rest = given.get("rest")
        if isinstance(rest, Mapping) and given.get("lr") == 0 and rest.get("lr"):
            yield Broken("lr", f"is 0, and rest.lr, which follows in proportion, is {rest['lr']}; set both to 0")


def _groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("options")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list | tuple) else []


class MuonOptionGroup(OptionGroup):
    """Options of their own for some parameters, under muon and beside it."""

    momentum: NotNegative | None = None
    """In place of the optimizer's momentum; for matrices."""


class Muon(_Matrices):
    """torch.optim.Muon for the matrices; what is not 2-D goes to the rest."""

    name: Literal["muon"]
    strategy: Annotated[Literal["zero1"], BeforeValidator(_not_cut)] = "zero1"
    """zero1: each parameter has one owner, who steps it whole."""
    lr: NotNegative
    """Base learning rate; the schedule scales it."""
    momentum: NotNegative = 0.95
    """Share of the last momentum that is carried on."""
    nesterov: bool = True
    """Nesterov momentum."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay."""
    ns_steps: Annotated[int, Field(ge=0, lt=100)] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = (3.4445, -4.775, 2.0315)
    """Of the polynomial of an iteration."""
    eps: NotNegative = 1e-7
    """Least norm that a gradient is divided by."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """Factor of the rate by shape. original, and null: sqrt(max(1, rows / columns)). match_rms_adamw: 0.2 times the
    root of the larger side, so that a rate found with adamw fits."""
    rest: Rest = RestAdamW(name="adamw")
    """The optimizer of the parameters that are not 2-D, or that it names."""
    options: Annotated[tuple[MuonOptionGroup, ...], Field(strict=False)] = ()
    """Options of their own for some parameters, of the matrices and of the rest; the first match wins."""


# ---- of the recipe -------------------------------------------------------------------------------------------------


class FactoryOptionGroup(Matched):
    """Options of their own for some parameters, under an optimizer of the recipe."""

    factory_options: PlainOptions = Field(default={})
    """Besides or in place of the optimizer's factory_options."""


def _name_in_recipe(name: str) -> str:
    if not name.isidentifier():
        raise rule_error(f"{name!r} is no name of a function or class; import it in the recipe if it is elsewhere")
    return name


class Factory(_Matrices):
    """An optimizer of the recipe: a torch.optim.Optimizer class, or a function that makes one of param groups."""

    factory: Annotated[str, AfterValidator(_name_in_recipe)]
    """Its name in the recipe, called as factory(param_groups, lr=..., **factory_options). Records are held to it."""
    kind: Literal["elementwise", "matrix"]
    """What its author claims. elementwise: an element's update depends on its own gradient and state only. matrix: on
    the whole tensor's."""
    takes: Literal["all", "matrices"] = "all"
    """matrices: 2-D parameters only; the others go to the rest."""
    strategy: Literal["zero2", "zero1"] = "zero2"
    """zero2: optimizer state and reduced gradients are cut evenly over the ranks. zero1: each parameter has one owner,
    who steps it whole; of kind matrix always."""
    lr: NotNegative
    """Base learning rate; the schedule scales it."""
    factory_options: PlainOptions = Field(default={})
    """Its other options, as keyword arguments."""
    rest: Rest | None = None
    """The optimizer of the parameters that are not 2-D, where it takes matrices only, or that the rest names; null:
    adamw."""
    options: Annotated[tuple[FactoryOptionGroup, ...], Field(strict=False)] = ()
    """Options of their own for some parameters; the first match wins."""

    @model_validator(mode="before")
    @classmethod
    def _owned(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("kind") == "matrix" and "strategy" not in given:
            return {**given, "strategy": "zero1"}
        return given

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """What the kind demands, and nothing that would have no effect."""
        yield from super().rules(given)
        if given.get("kind") == "matrix" and given.get("strategy") == "zero2":
            yield Broken("strategy", f"{given.get('factory')} is declared as one that {_WHOLE}")
        if given.get("kind") == "elementwise" and given.get("takes") == "matrices":
            yield Broken("takes", "matrices, and an elementwise optimizer takes every shape; leave it out")
        rest = given.get("rest")
        if rest is not None and given.get("kind") == "elementwise":
            yield Broken("rest", "is for what an optimizer of matrices leaves, and this is elementwise; leave it out")
        elif isinstance(rest, Mapping) and given.get("takes", "all") == "all" and not rest.get("match"):
            yield Broken("rest", "has no effect, as the factory takes all; write rest.match, or takes: matrices")
        if _has_lr(given):
            yield Broken("factory_options", "lr has its place at optimizer.lr, which the schedule scales")
        if any(map(_has_lr, _groups(given))):
            yield Broken("options", "lr in factory_options; write lr_scale, a factor of optimizer.lr")


def _has_lr(place: Mapping[str, Any]) -> bool:
    options = place.get("factory_options")
    return isinstance(options, Mapping) and "lr" in options
