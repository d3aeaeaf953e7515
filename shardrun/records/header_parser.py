"""The header grammar of safetensors, read strictly: what is not exactly a table of tensors is refused where it stands.

A general JSON parser would build whatever a crafted header asks for, and takes the last of two equal keys. This one
stops at the first token that does not belong, so that it never holds more than the table itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

METADATA = "__metadata__"

# In the order in which the official library puts the dtypes of a file: code, bytes per element, name in torch.
_DTYPES = (
    ("U64", 8, "uint64"),
    ("I64", 8, "int64"),
    ("F64", 8, "float64"),
    ("C64", 8, "complex64"),
    ("F32", 4, "float32"),
    ("U32", 4, "uint32"),
    ("I32", 4, "int32"),
    ("BF16", 2, "bfloat16"),
    ("F16", 2, "float16"),
    ("U16", 2, "uint16"),
    ("I16", 2, "int16"),
    ("F8_E5M2FNUZ", 1, "float8_e5m2fnuz"),
    ("F8_E4M3FNUZ", 1, "float8_e4m3fnuz"),
    ("F8_E8M0", 1, "float8_e8m0fnu"),
    ("F8_E4M3", 1, "float8_e4m3fn"),
    ("F8_E5M2", 1, "float8_e5m2"),
    ("I8", 1, "int8"),
    ("U8", 1, "uint8"),
    ("BOOL", 1, "bool"),
)
DTYPE_BYTES = {code: size for code, size, _ in _DTYPES}
DTYPE_NAMES = {code: name for code, _, name in _DTYPES}

_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\.)*+"')
# At most 19 digits: more cannot be a size, and are slow to turn into a number.
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")
_LARGEST = (1 << 63) - 1
_MOST_AXES = 64  # as in torch


class RawEntry(NamedTuple):
    """A tensor as the header has it; offsets count from the beginning of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(raw: bytes | bytearray, data_bytes: int) -> tuple[list[RawEntry], dict[str, str]]:
    """The tensors, in the order of their data, and the metadata of a header followed by `data_bytes` bytes.

    ValueError says what is wrong and, for faults of form, at which character.
    """
    entries, metadata = parse_table(raw)
    # An empty tensor comes before the one that begins at the same place.
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            what = (
                "overlaps the tensor before it" if entry.start < end else f"leaves a gap of {entry.start - end} bytes"
            )
            raise ValueError(f"{_short(entry.name)} begins at {entry.start:,} of the data and {what}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"the tensors take {end:,} bytes, {data_bytes:,} follow the header")
    return entries, metadata


def parse_table(raw: bytes | bytearray) -> tuple[list[RawEntry], dict[str, str]]:
    """As `parse_header`, whatever follows the header: for what is left of a file that was cut."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    return _Cursor(text).table()


def _short(name: str) -> str:
    return repr(name) if len(name) <= 100 else repr(name[:100]) + "..."


class _Cursor:
    """A place in the text of a header."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def table(self) -> tuple[list[RawEntry], dict[str, str]]:
        """The whole header."""
        if not self.text.startswith("{"):
            raise ValueError("does not begin with '{'")
        entries: dict[str, RawEntry] = {}
        metadata: dict[str, str] | None = None
        for name in self.keys():
            if name in entries or (name == METADATA and metadata is not None):
                raise ValueError(f"{_short(name)} stands twice")
            if name == METADATA:
                metadata = self.metadata()
            else:
                entries[name] = self.entry(name)
        if self.at != len(self.text):
            raise self.fault("the end")
        return list(entries.values()), metadata or {}

    def keys(self) -> Iterator[str]:
        """The keys of an object, one by one; the caller reads each value before it asks for the next key."""
        self.expect("{")
        if self.skip("}"):
            return
        while True:
            name = self.string()
            self.expect(":")
            yield name
            if self.skip("}"):
                return
            self.expect(",")

    def entry(self, name: str) -> RawEntry:
        """The description of one tensor; its size has to follow from shape and dtype."""
        fields: dict[str, list[int] | str] = {}
        for key in self.keys():
            if key not in ("dtype", "shape", "data_offsets") or key in fields:
                raise ValueError(f"{_short(name)}: {_short(key)} does not belong here, or stands twice")
            fields[key] = self.string() if key == "dtype" else self.numbers()
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
            raise ValueError(f"{_short(name)}: dtype, shape or data_offsets is missing")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{_short(name)}: unknown dtype {_short(dtype)}")
        size = DTYPE_BYTES[dtype]
        for axis in shape:
            size *= axis
            if size > _LARGEST:
                raise ValueError(f"{_short(name)}: shape {shape} is beyond any memory")
        if len(offsets) != 2 or offsets[1] - offsets[0] != size:
            raise ValueError(f"{_short(name)}: shape {shape} of {dtype} is {size:,} bytes, its offsets are {offsets}")
        return RawEntry(name, dtype, tuple(shape), offsets[0], offsets[1])

    def metadata(self) -> dict[str, str]:
        """A flat object of strings."""
        found: dict[str, str] = {}
        for key in self.keys():
            if key in found:
                raise ValueError(f"{METADATA}: {_short(key)} stands twice")
            found[key] = self.string()
        return found

    def numbers(self) -> list[int]:
        """A list of whole numbers, none of them negative."""
        self.expect("[")
        found: list[int] = []
        if self.skip("]"):
            return found
        while True:
            number = int(self.token(_NUMBER, "a whole number"))
            if number > _LARGEST:
                raise self.fault("a whole number below 2**63")
            found.append(number)
            if len(found) > _MOST_AXES:
                raise self.fault(f"at most {_MOST_AXES} numbers")
            if self.skip("]"):
                return found
            self.expect(",")

    def string(self) -> str:
        """A JSON string that is text (a lone surrogate is not)."""
        literal = self.token(_STRING, "a string")
        try:
            found = json.loads(literal) if "\\" in literal else literal[1:-1]
            found.encode("utf-8")
        except ValueError:
            raise self.fault("a string of valid characters") from None
        return str(found)

    def token(self, pattern: re.Pattern[str], what: str) -> str:
        self.space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fault(what)
        self.at = found.end()
        return found[0]

    def expect(self, character: str) -> None:
        if not self.skip(character):
            raise self.fault(f"'{character}'")

    def skip(self, character: str) -> bool:
        """Step over `character`, and the space around it, if it comes next."""
        self.space()
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        self.space()
        return True

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def fault(self, wanted: str) -> ValueError:
        here = self.text[self.at : self.at + 20]
        return ValueError(f"{wanted} expected at character {self.at}, found {here!r}")
