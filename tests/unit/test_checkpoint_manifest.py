"""The manifest: one form, its own digest, and a reader that refuses everything else without harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.checkpoint.manifest import canonical_json, parse_manifest, seal, sha256
from shardrun.errors import CheckpointError

HASH = f"blake3:{'0' * 64}"
SPEC = {"path": "w", "shape": [2], "dtype": "float32", "trainable": True, "alias": 0}
RECORD = {
    "path": "zero2/default/r",
    "bytes": 10,
    "hash": f"blake3:{'a' * 64}",
    "role": "record",
    "rank": 0,
    "group": "default",
    "fragments": {"w": [0, 2]},
    "meta": {"version": 1},
}
GOOD: dict[str, Any] = {
    "step": 3,
    "sequence": 1,
    "saved_at": 1_700_000_000,
    "topology": {"world_size": 1},
    "groups": {"default": {"contract": [SPEC], "members": [0]}},
    "model": {"w": ["float32", [2]]},
    "aliases": {"tied": "w"},
    "files": [RECORD, {"path": "model.safetensors", "bytes": 0, "hash": HASH, "role": "model", "rank": 0}],
    "counters": {"tokens": 7, "loss": 0.1 + 0.2},
}


def test_round_trip() -> None:
    found = parse_manifest(seal(GOOD))
    assert {key: found[key] for key in GOOD} == GOOD
    assert (found["format"], found["version"]) == ("shardrun-checkpoint", 2)
    assert seal(dict(reversed(GOOD.items()))) == seal(GOOD)


def test_values_that_are_not_json_are_not_written() -> None:
    for value in (float("nan"), float("inf"), {1, 2}, object()):
        with pytest.raises((ValueError, TypeError)):
            seal({**GOOD, "counters": value})


def test_every_single_bit_is_guarded() -> None:
    raw = seal(GOOD)
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(damaged))


def test_every_cut_is_found() -> None:
    raw = seal(GOOD)
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            parse_manifest(raw[:length])


def resealed(value: Any) -> bytes:
    """A manifest with a right digest around whatever a hostile author wants."""
    return canonical_json({**value, "digest": sha256(canonical_json(value))}) + b"\n"


HEAD = {"format": "shardrun-checkpoint", "version": 2}
ENTRY = GOOD["files"][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a manifest of format"),
        ({"version": 3}, "format version 3; this shardrun reads versions 1 and 2"),
        ({"version": True}, "format version True"),
        ({"version": None}, "format version None"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": 1 << 64}, "step is"),
        ({"sequence": None}, "sequence is None"),
        ({"saved_at": "now"}, "saved_at is 'now'"),
        ({"topology": {"world_size": 0}}, "world_size"),
        ({"topology": []}, "world_size"),
        ({"model": []}, "model is missing"),
        ({"model": {"w": ["float32", [-1]]}}, r"model: w is"),
        ({"model": {"w": ["float32"]}}, r"model: w is"),
        ({"aliases": {"w": "w"}}, "no tensor of the model"),
        ({"aliases": {"x": "y"}}, "no tensor of the model"),
        ({"aliases": {"x": ["w"]}}, "no tensor of the model"),
        ({"groups": {"../x": {"contract": []}}}, "is not a group"),
        ({"groups": {"default": {}}}, "is not a group"),
        ({"groups": {"default": {"contract": [{**SPEC, "alias": 1}]}}}, "is not a group"),
        ({"groups": {"default": {"contract": [SPEC, SPEC]}}}, "is not a group"),
        ({"groups": {"default": {"contract": [SPEC], "members": "all"}}}, "members"),
        ({"files": {}}, "files is missing"),
        ({"files": [None]}, "not a path inside"),
        ({"files": [{**ENTRY, "path": "../../etc/passwd"}]}, "not a path inside"),
        ({"files": [{**ENTRY, "path": "/etc/passwd"}]}, "not a path inside"),
        ({"files": [{**ENTRY, "path": "a/./b"}]}, "not a path inside"),
        ({"files": [{**ENTRY, "path": "manifest.json"}]}, "not a path inside"),
        ({"files": [{**ENTRY, "path": ["a"]}]}, "not a path inside"),
        ({"files": [ENTRY, ENTRY]}, "a path stands twice"),
        ({"files": [{**ENTRY, "bytes": -1}]}, "bytes is missing"),
        ({"files": [{**ENTRY, "hash": None, "sha256": "a" * 64}]}, "model.safetensors: hash is missing"),
        ({"files": [{**ENTRY, "hash": HASH.upper()}]}, "hash is missing or malformed"),
        ({"files": [{**ENTRY, "hash": HASH + "\n"}]}, "hash is missing or malformed"),
        ({"files": [{**ENTRY, "hash": f"md5:{'0' * 64}"}]}, "hash is by md5; this shardrun knows blake3, sha256"),
        ({"version": 1}, "hash is missing or malformed"),
        ({"version": 1, "files": [{**ENTRY, "sha256": "A" * 64}]}, "hash is missing or malformed"),
        ({"version": 1, "files": [{**ENTRY, "sha256": ["a"]}]}, "hash is missing or malformed"),
        ({"files": [{**ENTRY, "role": "pickle"}]}, "role 'pickle'"),
        ({"files": [{**ENTRY, "rank": 1}]}, "rank 1 cannot be"),
        ({"files": [{**RECORD, "group": "other"}]}, "group 'other' is not in"),
        ({"files": [{**RECORD, "group": ["default"]}]}, "is not in the manifest"),
        ({"files": [{**RECORD, "meta": None}]}, "meta or fragments"),
        ({"files": [{**RECORD, "fragments": {"w": [2, 0]}}]}, "fragment w is"),
        ({"files": [{**RECORD, "fragments": {"w": [0, 2, 3]}}]}, "fragment w is"),
        ({"counters": json.loads("[" * 60 + "]" * 60)}, "levels deep"),
    ],
)
def test_a_well_sealed_lie_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_manifest(resealed({**HEAD, **GOOD, **change}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format":"shardrun-checkpoint","format":"shardrun-checkpoint"}',
        b'{"format":"shardrun-checkpoint","version":NaN}',
        b'{"format":"shardrun-checkpoint","version":1,"lr":1e999}',
        b'{"format":"shardrun-checkpoint","version":' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(raw)


def test_another_form_of_the_same_value_is_refused() -> None:
    found = json.loads(seal(GOOD))
    for raw in (json.dumps(found, indent=1).encode(), canonical_json(found), seal(GOOD) + b"\n"):
        with pytest.raises(CheckpointError, match="canonical form"):
            parse_manifest(raw)


KEYS = sorted({*GOOD, *RECORD, *SPEC, "w", "default", "digest", "format"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 65) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["w", "default", "record", "model", "../x", "a" * 64, "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4), inside=st.booleans())
def test_hostile_manifests_end_in_a_manifest_or_a_refusal(changes: dict[str, Any], inside: bool) -> None:
    changed = {**HEAD, **GOOD, **({"files": [{**RECORD, **changes}]} if inside else changes)}
    try:
        found = parse_manifest(resealed({k: v for k, v in changed.items() if k != "digest"}))
    except CheckpointError:
        return
    assert all(entry["path"].split("/")[0] not in ("", "..") for entry in found["files"])
