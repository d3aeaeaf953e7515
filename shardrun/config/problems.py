"""pydantic's errors in the user's words: place, dotted key, what is wrong, the value found, the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardrun.config.document import Document, KeyPath, Problem, dotted
from shardrun.config.optimizers import OPTIMIZERS, REFUSED
from shardrun.config.rest import RESTS
from shardrun.config.section import RULE
from shardrun.config.suggest import MODELS, meant

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
# What a required key is for, where its name does not say it.
_MISSING: dict[tuple[str, ...], str] = {
    ("optimizer", "kind"): "; write elementwise or matrix, which is what the author of the optimizer claims"
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
    path = _as_written(detail["loc"])
    if kind == "extra_forbidden":
        text = f"unknown key (found {shown(found)}); {meant(path, document.data)}"
        yield Problem(document.place(path, of_key=True), f"{dotted(path)}: {text}")
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield from _unnamed(path, found, document)
    else:
        hint = _MISSING.get(tuple(map(str, path[-2:])), "") if kind == "missing" else ""
        yield Problem(document.place(path), f"{dotted(path)}: {_sentence(detail)}{hint}")


def _as_written(path: KeyPath) -> KeyPath:
    """pydantic's location without the members of unions, which it names and the file does not."""
    for key, members in (("optimizer", MODELS), ("rest", RESTS)):
        if key in path[:-1] and path[path.index(key) + 1] in members:
            at = path.index(key) + 1
            path = (*path[:at], *path[at + 1 :])
    return path


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


def _unnamed(path: KeyPath, found: Any, document: Document) -> Iterator[Problem]:
    """An optimizer's name is missing, unknown or refused. What else is wrong in the section is found all the same."""
    if not isinstance(found, Mapping):
        yield Problem(document.place(path), f"{dotted(path)}: {_NEEDS['model_type']}, found {shown(found)}")
        return
    models = RESTS if path[-1] == "rest" else OPTIMIZERS
    name, key = found.get("name"), (*path, "name")
    if name is None:
        own = "" if models is RESTS else "; or factory, for one of the recipe"
        text = f"required key is missing; one of {', '.join(models)}{own}"
    elif models is OPTIMIZERS and str(name).lower() in REFUSED:
        text = REFUSED[str(name).lower()]
    else:
        text = _one_of(name, [*models])
    yield Problem(document.place(key), f"{dotted(key)}: {text}")
    keys = {key for model in models.values() for key in model.model_fields}
    try:
        models["adamw"].model_validate({**found, "name": "adamw"})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] != "extra_forbidden" or detail["loc"][0] not in keys:
                yield from _explain({**detail, "loc": (*path, *detail["loc"])}, document)
