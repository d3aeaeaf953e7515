"""The text under a key as its description in the JSON schema, read from the source only where a schema is asked for.

pydantic's own `use_attribute_docstrings` reads the source of every model when it is defined, which every command and
every rank would wait for.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel


def describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the descriptions of `model`'s keys to its JSON schema; for pydantic's `json_schema_extra`."""
    properties = schema.get("properties", {})
    texts = _texts(model)
    for name, field in model.model_fields.items():
        described = properties.get(field.alias or name)
        if described is not None and name in texts:
            described.setdefault("description", texts[name])


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field, its own or that of a base."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel and not _is_made_by_pydantic(base):
            found |= _texts_in(inspect.getsource(base))
    return found


def _is_made_by_pydantic(model: type[BaseModel]) -> bool:
    """Whether it is a generic model with its parameter filled in, which has no source; its origin is a base of it."""
    return bool(model.__pydantic_generic_metadata__["args"])


def _texts_in(source: str) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
