"""Cheap mutations of headers and manifests: of their bytes, and of what a manifest says before it is sealed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u0000", b"\\ud800", b"\xff\xfe", b"\x00", b" " * 64, b"null",
    b"true", b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"1.5", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"9" * 40, b"[" * 200, b'{"a":' * 100, b'"__metadata__"', b'"dtype":"F32"',
    b'"data_offsets":[0,8]', b'"shape":[4294967296,4294967296]', b'"../../x"', b'"/etc/passwd"',
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**200, 0.5, 1e308, "", "x", "..", "../up", "/abs", "a/../b",
    "step-0000000001", "x" * 5000, "\ud800", "\x00", [], {}, [[]], [0, 2**62], [-1, 1], {"a": {"b": []}}, ["x"] * 300,
    "model.safetensors", "manifest.json", "0" * 64, "zero2/default/rank-00000-of-00001.safetensors",
)  # fmt: skip


def mutated_bytes(raw: bytes, other: bytes, chance: random.Random) -> bytes:
    """`raw` after one to four changes: a bit, a byte, a cut, a repeat, a swap, a token, or a piece of `other`."""
    data = bytearray(raw)
    for _ in range(chance.randrange(1, 5)):
        chance.choice(_BYTE_KINDS)(data, other, chance)
    return bytes(data)


def _span(data: bytes | bytearray, chance: random.Random, longest: int = 40) -> slice:
    start = chance.randrange(len(data) + 1)
    return slice(start, start + chance.randrange(longest))


def _bit(data: bytearray, other: bytes, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(data: bytearray, other: bytes, chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _cut(data: bytearray, other: bytes, chance: random.Random) -> None:
    del data[_span(data, chance)]


def _end(data: bytearray, other: bytes, chance: random.Random) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _repeat(data: bytearray, other: bytes, chance: random.Random) -> None:
    span = _span(data, chance)
    data[span.start : span.start] = bytes(data[span]) * chance.choice((1, 1, 2, 50))


def _token(data: bytearray, other: bytes, chance: random.Random) -> None:
    span = _span(data, chance, longest=12)
    data[span] = chance.choice(_TOKENS)


def _digit(data: bytearray, other: bytes, chance: random.Random) -> None:
    places = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if places:
        data[chance.choice(places)] = 48 + chance.randrange(10)


def _splice(data: bytearray, other: bytes, chance: random.Random) -> None:
    data[_span(data, chance)] = other[_span(other, chance, longest=200)]


def _length(data: bytearray, other: bytes, chance: random.Random) -> None:
    """The length that a safetensors file begins with."""
    data[:8] = chance.choice((0, 2, len(data), max(0, len(data) - 8), 2**26, 2**40, 2**63, 2**64 - 1)).to_bytes(
        8, "little"
    )


_BYTE_KINDS: tuple[Callable[[bytearray, bytes, random.Random], None], ...] = (
    _bit, _byte, _cut, _end, _repeat, _token, _token, _digit, _digit, _splice, _length,
)  # fmt: skip


def mutated_value(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy of plain data after one to three changes: a value replaced, removed, doubled, moved or given a new key."""
    changed = copy.deepcopy(document)
    for _ in range(chance.randrange(1, 4)):
        holders = _holders(changed)
        holder = chance.choice(holders)
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        kind = chance.randrange(5)
        if not keys or kind == 0:
            _add(holder, chance)
        elif kind == 1:
            del holder[chance.choice(keys)]
        elif kind == 2:
            other = chance.choice(holders)
            others = list(other.values()) if isinstance(other, dict) else other
            if others:  # copied: no value may hold itself
                holder[chance.choice(keys)] = copy.deepcopy(chance.choice(others))
        else:
            holder[chance.choice(keys)] = copy.deepcopy(chance.choice(_VALUES))
    return changed


def _add(holder: Any, chance: random.Random) -> None:
    value = copy.deepcopy(chance.choice(_VALUES))
    if isinstance(holder, dict):
        holder[json.dumps(chance.choice(_VALUES))[:50]] = value
    else:
        holder.insert(chance.randrange(len(holder) + 1), value)


def _holders(value: Any) -> list[Any]:
    """Every mapping and list in plain data, itself included."""
    found, todo = [], [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict | list):
            found.append(one)
            todo += one.values() if isinstance(one, dict) else one
    return found
