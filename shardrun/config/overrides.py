"""Trailing `dotted.key=value` words of the command line, laid over the document before it is validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardrun.config.document import Document, KeyPath, Place, Problem, dotted, read_document
from shardrun.errors import ConfigError


def apply_overrides(document: Document, words: Sequence[str]) -> None:
    """Lay the words over the document, in order. Values are read as YAML scalars or flow values: `[a, b]`, `{k: v}`.

    A word replaces the whole value at its key; sections on the way are made. What cannot be meant becomes a problem of
    the document, placed at the word.
    """
    given: dict[KeyPath, str] = {}
    for number, word in enumerate(words, start=1):
        place = Place(number, 0, 0, f"override {word!r}")
        key, equals, text = word.partition("=")
        path: KeyPath = tuple(key.strip().split("."))
        if not equals or not all(path):
            document.problems.append(Problem(place, "not of the form dotted.key=value"))
        elif path in given:
            document.problems.append(
                Problem(place, f"{dotted(path)}: already set by {given[path]!r}; keep one of them")
            )
        else:
            given[path] = word
            _lay(document, path, text, place)


def _lay(document: Document, path: KeyPath, text: str, place: Place) -> None:
    try:
        parent, path = _parent(document, path, place)
        value = read_document(text, place.text, word=place.word, at=path)
        if isinstance(value.data, dict | list) and text.lstrip()[:1] not in ("{", "["):
            raise ConfigError(f"{place.text}: {dotted(path)}: a list is written [a, b] and a section {{key: value}}")
    except ConfigError as error:
        hint = (
            "; a text with * & ! % @ in front has to be in double quotes"
            if text.lstrip().startswith(tuple("*&!%@`"))
            else ""
        )
        document.problems.append(Problem(place, str(error).removeprefix(f"{place.text}: ") + hint))
        return
    document.forget(path)
    parent[path[-1]] = value.data
    for end in range(1, len(path)):
        document.keys.setdefault(path[:end], place)
    document.keys[path] = place
    document.values[path] = place
    document.keys.update(value.keys)
    document.values.update(value.values)
    document.problems.extend(value.problems)


def _parent(document: Document, path: KeyPath, place: Place) -> tuple[Any, KeyPath]:
    """The section or list that holds the key, and the path with positions in lists as numbers."""
    if document.data is None:
        document.data = {}
    here: Any = document.data
    walked: list[str | int] = []
    for index, part in enumerate(path):
        step = _step(here, tuple(walked), part, place)
        walked.append(step)
        if index == len(path) - 1:
            break
        if isinstance(here, dict) and here.get(step) is None:
            here[step] = {}
        here = here[step]
    return here, tuple(walked)


def _step(here: Any, walked: KeyPath, part: str | int, place: Place) -> str | int:
    """`part` as an index into `here`, which stands at `walked`."""
    if isinstance(here, dict):
        return part
    if isinstance(here, list):
        if str(part).isdecimal() and int(part) < len(here):
            return int(part)
        raise ConfigError(f"{place.text}: {dotted(walked)} is a list of {len(here)}; no entry {part!r} in it")
    raise ConfigError(f"{place.text}: {dotted(walked)} is {here!r} and no section; {part!r} cannot be set in it")
