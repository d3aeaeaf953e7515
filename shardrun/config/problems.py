"""pydantic's errors in the user's words: place, dotted key, what is wrong, the value found, the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardrun.config.document import Document, KeyPath, Problem, dotted
from shardrun.config.optimizers import REFUSED
from shardrun.config.section import RULE
from shardrun.config.suggest import OPTIMIZERS, meant

GROUPS = "several groups come later; write one group, with select and optimizer at the top level"

_NEEDS = {
    "bool_type": "needs true or false",
    "dict_type": "needs a section (key: value)",
    "finite_number": "needs a finite number",
    "float_type": "needs a number",
    "int_type": "needs a whole number",
    "model_attributes_type": "needs a section (key: value)",
    "model_type": "needs a section (key: value)",
    "path_type": "needs text",
    "string_type": "needs text",
    "tuple_type": "needs a list",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """Every pydantic error as a Problem placed in the document."""
    return [problem for detail in error.errors(include_url=False) for problem in _explain(detail, document)]


def shown(value: Any) -> str:
    """A value as a reader of YAML knows it, cut to a line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Mapping():
            return "a section"
        case list() | tuple():
            return "a list"
        case str():
            return f"text {value[:60]!r}"
    return str(value)[:60]


def _explain(detail: ErrorDetails, document: Document) -> Iterator[Problem]:
    kind, found = detail["type"], detail["input"]
    path: KeyPath = detail["loc"]
    if path[:1] == ("optimizer",) and len(path) > 1 and path[1] in OPTIMIZERS:
        path = ("optimizer", *path[2:])  # pydantic's location names the member of the union, the file does not
    if kind == "extra_forbidden":
        text = GROUPS if path == ("groups",) else f"unknown key (found {shown(found)}); {meant(path, document.data)}"
        yield Problem(document.place(path, of_key=True), f"{dotted(path)}: {text}")
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield from _optimizer(path, found, document)
    else:
        yield Problem(document.place(path), f"{dotted(path)}: {_sentence(detail)}")


def _sentence(detail: ErrorDetails) -> str:
    kind, found, ctx = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == RULE:
        return detail["msg"]
    if kind == "missing":
        return "required key is missing"
    if kind == "literal_error":
        return _one_of(found, [word.strip("' ") for word in ctx["expected"].replace(" or ", ",").split(",")])
    if kind in _BOUNDS:
        return f"{shown(found)} is out of range; allowed: {_BOUNDS[kind]} {next(iter(ctx.values()))}"
    if kind == "too_short":
        return f"needs at least {ctx['min_length']} entry, found {ctx['actual_length']}"
    if kind == "too_long":
        return f"needs {ctx['max_length']} entries, found {ctx['actual_length']}"
    if kind == "string_pattern_mismatch":
        return f"{shown(found)} is no name; use letters, digits and . _ - and start with a letter or digit"
    if kind in _NEEDS:
        return f"{_NEEDS[kind]}, found {shown(found)}{_conversion(kind, found)}"
    return f"{detail['msg']}, found {shown(found)}"


def _one_of(found: Any, allowed: list[str]) -> str:
    near = difflib.get_close_matches(str(found).lower(), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"found {shown(found)}; allowed: {', '.join(allowed)}{hint}"


def _conversion(kind: str, found: Any) -> str:
    """The value that was probably meant by one of another type."""
    text = str(found).lower()
    if kind == "int_type" and isinstance(found, float) and found.is_integer():
        return f"; write {int(found)}"
    if kind == "bool_type" and text in ("yes", "on", "y", "1", "true"):
        return "; write true"
    if kind == "bool_type" and text in ("no", "off", "n", "0", "false"):
        return "; write false"
    if kind in ("int_type", "float_type") and isinstance(found, str):
        plain = found.replace("_", "").replace(",", "").strip()
        return f"; write {plain}" if plain.isdecimal() else ""
    return ""


def _optimizer(path: KeyPath, found: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    """The optimizer's name is missing, unknown or refused. What else is wrong in the section is found all the same."""
    name, key = found.get("name"), (*path, "name")
    if name is None:
        text = f"required key is missing; one of {', '.join(OPTIMIZERS)}"
    elif str(name).lower() in REFUSED:
        text = f"{REFUSED[str(name).lower()]}; use one of {', '.join(OPTIMIZERS)}"
    else:
        text = _one_of(name, [*OPTIMIZERS])
    yield Problem(document.place(key), f"{dotted(key)}: {text}")
    keys = {key for model in OPTIMIZERS.values() for key in model.model_fields}
    try:
        OPTIMIZERS["adamw"].model_validate({**found, "name": "adamw"})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] != "extra_forbidden" or detail["loc"][0] not in keys:
                yield from _explain({**detail, "loc": (*path, *detail["loc"])}, document)
