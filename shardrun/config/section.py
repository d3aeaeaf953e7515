"""What all sections share: unknown keys forbidden, no silent conversions, and every problem reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from shardrun.config.descriptions import describe

RULE = "shardrun_rule"  # the type of pydantic errors whose message is already in our own words

_CORE_ERRORS = frozenset(get_args(ErrorType))


class Broken(NamedTuple):
    """A rule between keys that does not hold: the key to point at, or the keys on the way to it, and the sentence."""

    key: str | tuple[str, ...]
    text: str


class Section(BaseModel):
    """Base of every section. Frozen; a text is no number, 1.0 is no whole number, NaN and infinity are no numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=describe,
        serialize_by_alias=True,  # a key that python keeps for itself has another name in the model
        defer_build=True,  # most models of optimizers are never asked for
    )

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """Rules between keys, on the values as written (any type), so that one wrong value does not hide them."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _every_problem(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        broken = list(cls.rules(given)) if isinstance(given, Mapping) else []
        problems = [_broken(one, given) for one in broken]
        try:
            section = handler(given)
        except ValidationError as error:
            problems[:0] = [_again(detail) for detail in error.errors(include_url=False)]
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return section


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a section as they are written."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _broken(one: Broken, given: Any) -> InitErrorDetails:
    keys = (one.key,) if isinstance(one.key, str) else one.key
    found = given
    for key in keys:
        found = found.get(key, found) if isinstance(found, Mapping) else found
    return InitErrorDetails(type=rule_error(one.text), loc=keys, input=found)


def rule_error(text: str) -> PydanticCustomError:
    """A pydantic error with a message of our own. `text` is taken as it is."""
    return PydanticCustomError(RULE, "{text}", {"text": text})


def _again(detail: Any) -> InitErrorDetails:
    kind = detail["type"]
    if kind not in _CORE_ERRORS:  # ours, or one that pydantic makes above its core
        kind = PydanticCustomError(kind, "{text}", {"text": detail["msg"]})
    return InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"], ctx=detail.get("ctx", {}))


def _pattern(text: str) -> str:
    if not text.removeprefix("re:"):
        raise rule_error("an empty pattern matches nothing")
    if text.startswith("re:"):
        try:
            re.compile(text[3:])
        except re.error as error:
            raise rule_error(f"{text!r} is not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
# A list in the file, a tuple in the model. Only the container is converted; its items stay strict.
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Natural = Annotated[int, Field(ge=0, le=2**62)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Decay, Decay], Field(strict=False)]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise rule_error(f"{value} is not finite and cannot be handed to the workers")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _finite(item)
    return value


# Arguments of somebody else's function: whatever YAML can write.
PlainOptions = Annotated[dict[str, Any], AfterValidator(_finite)]
