"""A YAML text as plain data in which every key and value knows where it was written.

Read by a safe loader of our own: the scalars of YAML 1.2's core schema (`1e-4` is a number, `yes` and `on` are texts),
duplicate keys are problems, no tags beyond the plain types, aliases up to a bound. Problems are collected, not raised,
so that they come together with those of the schema; only a text that is not YAML at all ends the reading at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from shardrun.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000  # after aliases are expanded; a config has some hundreds
MAX_DEPTH = 50
_NO_TAG = "the tag {} is not allowed; a config is plain values only"


class Place(NamedTuple):
    """Where something was written. Places sort as a reader meets them: the file top down, then the overrides."""

    word: int  # 0 for the file, then 1, 2, ... for the overrides
    line: int
    column: int
    text: str


class Problem(NamedTuple):
    """One thing that is wrong, and where."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place.text}: {self.text}"


@dataclass
class Document:
    """Plain data, with the place of the key and of the value for every path in it."""

    data: Any
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def forget(self, path: KeyPath) -> None:
        """Drop the places of a path and of everything below it."""
        for places in (self.keys, self.values):
            for known in [known for known in places if known[: len(path)] == path]:
                del places[known]

    def place(self, path: KeyPath, *, of_key: bool = False) -> Place:
        """The place of the value (or key) at `path`; for what was not written, of the nearest section around it."""
        for end in range(len(path), -1, -1):
            known = path[:end]
            first, second = (self.keys, self.values) if of_key or end < len(path) else (self.values, self.keys)
            found = first.get(known) or second.get(known)
            if found:
                return found
        return Place(0, 1, 1, "config")


class CoreLoader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema in place of those of 1.1."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML keeps its table in this class attribute


CORE_TYPES = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+0123456789."],
    ),
}
for _name, (_pattern, _first) in CORE_TYPES.items():
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def read_document(text: str, source: str, *, word: int = 0, at: KeyPath = ()) -> Document:
    """Read one YAML text that stands at the path `at` of the config.

    `source` names it in every place; `word` is 0 for a file, the override's number otherwise. Raises ConfigError with
    one problem if the text is not YAML.
    """
    return _Reader(text, source, word).read(at)


class _Reader:
    def __init__(self, text: str, source: str, word: int) -> None:
        self.text = text
        self.source = source
        self.word = word
        self.document = Document(None)
        self.count = 0
        self.seen: set[int] = set()

    def read(self, at: KeyPath) -> Document:
        document = self.document
        if len(self.text) > MAX_BYTES:
            raise ConfigError(f"{self.source}: {len(self.text)} characters are no config (at most {MAX_BYTES})")
        try:
            # The loader keeps the nodes alive, and with them the ids in `seen`.
            root = CoreLoader(self.text).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = self._at(mark).text if mark else self.source
            during = f" ({error.context})" if error.context else ""
            reason = str(error.problem).replace("found '\\x00'", "found the end of the text")
            raise ConfigError(f"{where}: not readable as YAML: {reason}{during}") from None
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self.source}: not readable as YAML: {reason}") from None
        except RecursionError:
            raise ConfigError(f"{self.source}: nested more than {MAX_DEPTH} deep") from None
        if root is not None:
            document.data = self._value(root, at, self._at(root.start_mark))
        return document

    def _at(self, mark: Any) -> Place:
        line, column = mark.line + 1, mark.column + 1
        text = self.source if self.word else f"{self.source}:{line}:{column}"
        return Place(self.word, line, column, text)

    def _problem(self, place: Place, text: str) -> None:
        self.document.problems.append(Problem(place, text))

    def _value(self, node: yaml.Node, path: KeyPath, key_place: Place) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise ConfigError(f"{key_place.text}: aliases (*name) expand to more than {MAX_VALUES} values")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{key_place.text}: nested more than {MAX_DEPTH} deep, or an alias inside itself")
        # A node met again is an alias: its own mark is that of the anchor, the key is where the reader has to look.
        place = key_place if id(node) in self.seen else self._at(node.start_mark)
        self.seen.add(id(node))
        self.document.values[path] = place
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._value(item, (*path, index), place) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            try:
                return plain_scalar(node.tag, node.value)
            except ValueError as error:
                self._problem(place, f"{dotted(path)}: {error}")
                return None
        self._problem(place, f"{dotted(path)}: {_NO_TAG.format(node.tag)}")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self._at(key_node.start_mark)
            key = key_node.value
            if isinstance(key, str):
                key = key.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                shown = repr(key) if isinstance(key, str) else f"a {key_node.id}"
                self._problem(place, f"{dotted(path)}: a key has to be text, found {shown}; put it in quotes")
            elif key == "<<" and key_node.style is None:
                self._problem(place, f"{dotted((*path, key))}: merge keys are not read; write the keys out")
            elif key in result:
                first = self.document.keys[(*path, key)]
                where = f"line {first.line} and line {place.line}" if not self.word else "one value"
                self._problem(place, f"{dotted((*path, key))}: written twice, on {where}; keep one of them")
            else:
                self.document.keys[(*path, key)] = place
                result[key] = self._value(value_node, (*path, key), place)
        return result


def plain_scalar(tag: str, text: str) -> Any:
    """The Python value of a YAML core scalar. ValueError for another tag, or a text that the tag does not fit."""
    match tag.removeprefix("tag:yaml.org,2002:"):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        case "float":
            return float(text.lower().replace(".i", "i").replace(".n", "n"))
        case "str":
            # A JSON escape such as \\ud83d\\ude00 comes from PyYAML as two halves; alone, a half is no text.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
    raise ValueError(_NO_TAG.format(tag))


def dotted(path: KeyPath) -> str:
    """`train.steps`, `optimizer.options[0].match`; the whole document is `config`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "config"
