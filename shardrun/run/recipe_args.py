"""`recipe_args` of the config against the recipe's own `Args`: all problems at once, unknown keys always among them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from shardrun.errors import ConfigError

PREFIX = "recipe_args"


def validate_args(args_class: type[BaseModel], arguments: Mapping[str, Any], source: str) -> BaseModel:
    """An instance of the recipe's `Args`. Raises `ConfigError` with every problem, one line each.

    Unknown keys are refused at every depth, whatever the recipe's models say about them: a mistyped argument would
    otherwise change the training without a word.
    """
    try:
        args = args_class.model_validate(dict(arguments))
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if not _told_as_unknown(detail)]
        problems = _unknown(args_class, arguments, PREFIX) + [_said(detail) for detail in details]
    else:
        problems = _unknown_within(args, arguments, PREFIX)
    if problems:
        raise ConfigError([f"{problem} (Args of {source})" for problem in problems])
    return args


def _told_as_unknown(detail: Any) -> bool:
    """Pydantic's own refusal of a top-level key, which `_unknown` words better."""
    return bool(detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1)


def _said(detail: Any) -> str:
    key = ".".join([PREFIX, *map(str, detail["loc"])])
    if detail["type"] == "missing":
        return f"{key}: missing, and it has no default"
    found = repr(detail["input"])
    message = "unknown argument" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
    return f"{key}: {message}; found {found if len(found) <= 80 else found[:77] + '...'}"


def _unknown_within(value: object, given: object, path: str) -> list[str]:
    """Keys of `given` that made no difference to `value`, which was validated from it."""
    problems: list[str] = []
    if isinstance(value, BaseModel) and isinstance(given, Mapping):
        problems += _unknown(type(value), given, path)
        names = _names(type(value))
        for key in (key for key in given if key in names):
            problems += _unknown_within(getattr(value, names[key]), given[key], f"{path}.{key}")
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        for key in (key for key in given if key in value):
            problems += _unknown_within(value[key], given[key], f"{path}.{key}")
    elif isinstance(value, list | tuple) and isinstance(given, list | tuple):
        for number, (item, raw) in enumerate(zip(value, given, strict=False)):
            problems += _unknown_within(item, raw, f"{path}.{number}")
    return problems


def _unknown(model: type[BaseModel], given: Mapping[str, Any], path: str) -> list[str]:
    """Keys that no field of the model answers to."""
    names = _names(model)
    problems = []
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(names)) or 'none'}"
            problems.append(f"{path}.{key}: unknown argument, found {given[key]!r}; {hint}")
    return problems


def _names(model: type[BaseModel]) -> dict[str, str]:
    """Every key under which a field can be given -> the field's name."""
    names = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        if alias is None or model.model_config.get("populate_by_name"):
            names[name] = name
        if alias is not None:
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            names |= {choice if isinstance(choice, str) else str(choice.path[0]): name for choice in choices}
    return names
