"""The safetensors writer and reader against the official library, and against crafted files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardrun.errors import CheckpointError
from shardrun.records import durable
from shardrun.records.header import (
    TensorBytes,
    planned_bytes,
    read_exactly,
    read_header,
    read_header_of,
    read_tensor,
    write_safetensors,
)
from shardrun.records.header_parser import DTYPE_BYTES
from shardrun.records.tensors import as_bytes, fresh_tensor, host_bytes, tensor_bytes

ODD = {
    "half": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "empty16": torch.zeros(3, 0, dtype=torch.float16),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(5),
    "view": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(10.0)[::3],
    'ünï/ \\ "quoted"\n': torch.tensor([1, 2, 3], dtype=torch.uint8),
    "phase": torch.tensor([1 + 2j]).conj(),
}


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    digest = write_safetensors(path, {n: tensor_bytes(n, t) for n, t in tensors.items()}, metadata or {})
    raw = path.read_bytes()
    assert (digest.bytes, digest.hash) == (len(raw), f"blake3:{blake3(raw).hexdigest()}")
    return raw


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes(host_bytes(one)) == bytes(host_bytes(other))


def test_official_library_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", ODD, {"format": "pt", "step": "3"})
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == ODD.keys()
    assert [name for name in ODD if not same(loaded[name], ODD[name])] == []
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "3"}
        assert same(opened.get_tensor("half"), ODD["half"])


def test_bytes_are_those_of_the_official_writer(tmp_path: Path) -> None:
    contiguous = {name: tensor.resolve_conj().contiguous() for name, tensor in ODD.items()}
    for dtype in (torch.float64, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2):
        contiguous[str(dtype)] = torch.ones(3, dtype=dtype)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        contiguous[str(dtype)] = torch.tensor([7], dtype=dtype)
    ours = write(tmp_path / "a.safetensors", contiguous, {"format": "pt"})
    assert ours == safetensors.torch.save(contiguous, {"format": "pt"})
    assert write(tmp_path / "empty.safetensors", {}) == safetensors.torch.save({})


def test_same_state_gives_same_file_whatever_the_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a", ODD, {"b": "2", "a": "1"})
    second = write(tmp_path / "b", dict(reversed(ODD.items())), {"a": "1", "b": "2"})
    assert first == second
    assert len(first) == planned_bytes({n: tensor_bytes(n, t) for n, t in ODD.items()}, {"a": "1", "b": "2"})


def test_we_read_what_the_official_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    contiguous = {name: tensor.resolve_conj().contiguous() for name, tensor in ODD.items()}
    safetensors.torch.save_file(contiguous, path, {"format": "pt", "k": "v"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "k": "v"}
    assert header.file_bytes == path.stat().st_size
    with path.open("rb") as file:
        for name, entry in header.tensors.items():
            tensor = fresh_tensor(entry)
            as_bytes(tensor)[:] = read_tensor(file, entry)
            assert same(tensor, contiguous[name]), name


def test_tensors_that_have_no_bytes_are_refused() -> None:
    for tensor in (
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, dtype=torch.complex128),
    ):
        with pytest.raises(CheckpointError, match=r"odd: .*cannot be stored"):
            tensor_bytes("odd", tensor)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("target", "link"):
        with pytest.raises(FileExistsError):
            write_safetensors(tmp_path / name, {}, {})
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    def data() -> bytes:
        alive.append(tracemalloc.get_traced_memory()[0])
        return bytes(1 << 20)

    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "a", {f"t{i}": TensorBytes("U8", (1 << 20,), data) for i in range(8)}, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(alive) == 8
    assert peak < 2.5 * (1 << 20)


def test_the_disk_begins_while_a_large_file_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(durable, "on_io", lambda call, path: calls.append(call))
    tensors = {
        "a": TensorBytes("U8", (20 << 20,), lambda: bytes(20 << 20)),
        "b": TensorBytes("U8", (3,), lambda: b"123"),
    }
    digest = write_safetensors(tmp_path / "a", tensors, {})
    assert digest.hash == f"blake3:{blake3((tmp_path / 'a').read_bytes()).hexdigest()}"
    assert (calls.count("start"), calls[-1]) == (2, "fsync")
    write_safetensors(tmp_path / "b", tensors, {}, fsync=False)
    assert (calls.count("start"), calls.count("fsync")) == (2, 1)


def test_a_file_that_the_disk_cannot_begin_with_is_an_error_and_one_that_needs_no_disk_is_none(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    durable.start_writing(writing, 0, 1, tmp_path)
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        durable.start_writing(writing, 0, 1, tmp_path)


# ---- crafted headers -----------------------------------------------------------------------------------------------

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def craft(path: Path, header: bytes | str | dict[str, object], data: int = 8, length: int | None = None) -> Path:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ONE = json.dumps(entry())

HOSTILE: dict[str, tuple[bytes | str | dict[str, object], str]] = {
    "duplicate name": ('{"a":' + ONE + ',"a":' + ONE + "}", "'a' stands twice"),
    "duplicate through escape": ('{"a":' + ONE + ',"\\u0061":' + ONE + "}", "'a' stands twice"),
    "duplicate metadata": ('{"__metadata__":{},"__metadata__":{},"a":' + ONE + "}", "stands twice"),
    "duplicate in metadata": ('{"__metadata__":{"k":"1","k":"2"}}', "'k' stands twice"),
    "duplicate field": ('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "stands twice"),
    "unknown field": ({"a": {**entry(), "extra": "x"}}, "does not belong"),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, "missing"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlaps"),
    "same bytes twice": ({"a": entry(), "b": entry()}, "overlaps"),
    "gap": ({"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[0], offsets=[8, 8])}, "gap of 4 bytes"),
    "late start": ({"a": entry(shape=[1], offsets=[4, 8])}, "gap of 4 bytes"),
    "data left over": ({"a": entry(shape=[1], offsets=[0, 4])}, "take 4 bytes, 8 follow"),
    "data too short": ({"a": entry(shape=[4], offsets=[0, 16])}, "take 16 bytes, 8 follow"),
    "negative": ({"a": entry(shape=[-2], offsets=[8, 0])}, "whole number"),
    "reversed": ({"a": entry(offsets=[8, 0])}, "offsets are"),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, "offsets are"),
    "float size": ({"a": entry(shape=[2.0])}, "whole number"),
    "exponent": ('{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', "whole number"),
    "leading zero": ('{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', "whole number"),
    "true as size": ({"a": entry(shape=[True, 2])}, "whole number"),
    "overflow": ({"a": entry(shape=[1 << 32, 1 << 32], offsets=[0, 0])}, "beyond any memory"),
    "overflow hidden by a zero": ({"a": entry(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])}, "beyond any memory"),
    "axis that is no int64": ({"a": entry(shape=[0, 1 << 63], offsets=[0, 0])}, r"below 2\*\*63"),
    "digits without end": ('{"a":{"dtype":"F32","shape":[' + "9" * 50_000 + "]}}", "whole number"),
    "axes without end": ({"a": entry(shape=[1] * 100_000)}, "at most 64"),
    "unknown dtype": ({"a": entry("F31")}, "unknown dtype 'F31'"),
    "sub-byte dtype": ({"a": entry("F4", [16])}, "unknown dtype"),
    "wrong dtype": ({"a": entry("F64")}, "16 bytes, its offsets"),
    "null": ('{"a":null}', "'{' expected"),
    "list": ("[]", "begin with"),
    "deep": ('{"a":' + "[" * 100_000, "'{' expected"),
    "deep objects": ('{"a":' * 100_000, "does not belong"),
    "deep shape": ('{"a":{"shape":' + "[" * 100_000, "whole number"),
    "not utf-8": (b'{"\xff\xfe":{}}', "not UTF-8"),
    "lone surrogate": ('{"\\ud800":' + ONE + "}", "valid characters"),
    "bad escape": ('{"\\x":' + ONE + "}", "valid characters"),
    "control character": ('{"a\x01":' + ONE + "}", "a string expected"),
    "metadata of numbers": ('{"__metadata__":{"k":1}}', "a string expected"),
    "metadata as tensor": ({"__metadata__": entry()}, "a string expected"),
    "trailing text": (json.dumps(GOOD) + "x", "the end expected"),
    "two documents": (json.dumps(GOOD) + json.dumps(GOOD), "the end expected"),
    "comma at the end": ('{"a":' + ONE + ",}", "a string expected"),
    "cut": (json.dumps(GOOD)[:-2], "expected"),
    "nothing": ("", "begin with"),
    "spaces": ("     ", "begin with"),
    "space before": (" " + json.dumps(GOOD), "begin with"),
    "NUL bytes": ("\0" * 64, "begin with"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_crafted_header_is_refused(tmp_path: Path, name: str) -> None:
    header, words = HOSTILE[name]
    path = craft(tmp_path / "bad.safetensors", header)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1500


def test_the_good_header_is_accepted(tmp_path: Path) -> None:
    header = read_header(craft(tmp_path / "good", json.dumps(GOOD) + "   "))
    assert header.tensors["a"].shape == (2,)
    assert next(iter(DTYPE_BYTES)) == "U64"


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 65 << 20, 9999])
def test_a_claimed_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = craft(tmp_path / "huge", json.dumps(GOOD), length=length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="its header would be"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_sparse_file_with_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    path = craft(tmp_path / "sparse", "", data=0, length=1 << 33)
    os.truncate(path, 1 << 34)
    with pytest.raises(CheckpointError, match="its header would be"):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 1, 7])
def test_a_file_without_length_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "stub"
    path.write_bytes(bytes(keep))
    with pytest.raises(CheckpointError, match=f"{keep} bytes found"):
        read_header(path)


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    craft(tmp_path / "good", json.dumps(GOOD))
    (tmp_path / "link").symlink_to("good")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing", "."):
        with pytest.raises(CheckpointError):
            read_header(tmp_path / name)


def test_a_file_that_shrinks_while_being_read_is_an_error(tmp_path: Path) -> None:
    path = craft(tmp_path / "shrinks", json.dumps(GOOD))
    with path.open("rb", buffering=0) as file:
        header, _ = read_header_of(file, str(path))
        os.truncate(path, path.stat().st_size - 3)
        with pytest.raises(CheckpointError, match="ended 3 bytes early"):
            read_tensor(file, header.tensors["a"], str(path))
        with pytest.raises(CheckpointError, match="ended"):
            read_exactly(file, 10, str(path))


def accepted_by_official(raw: bytes) -> bool:
    try:
        safetensors.torch.load(raw)
    except Exception:  # the official library raises many kinds; any of them is a refusal
        return False
    return True


VALID = safetensors.torch.save(
    {"a": torch.arange(3.0), "b": torch.zeros(2, 0), "c": torch.tensor(1, dtype=torch.int64)}, {"format": "pt"}
)


def read_or_refuse(path: Path, raw: bytes) -> bool:
    """Whether our reader takes `raw`; any other exception than CheckpointError escapes."""
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except CheckpointError:
        return False
    with path.open("rb") as file:
        for one in header.tensors.values():
            read_tensor(file, one)
    return True


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_refused_or_are_what_the_official_library_accepts(
    tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        cut = data.draw(st.integers(0, 3))
        raw[at : at + cut] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"}", b"[", b",", b"0", b" "])
        )
        if not raw:
            break
    if data.draw(st.booleans()) and len(raw) > 8:  # a right length lets the damage reach the grammar
        raw[:8] = VALID[:8]
    if read_or_refuse(tmp_path / "fuzzed", bytes(raw)):
        assert accepted_by_official(bytes(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "U8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON, tail=st.integers(0, 16))
def test_any_json_is_refused_or_is_what_the_official_library_accepts(tmp_path: Path, value: object, tail: int) -> None:
    text = json.dumps(value).encode()
    raw = len(text).to_bytes(8, "little") + text + bytes(tail)
    if read_or_refuse(tmp_path / "fuzzed", raw):
        assert accepted_by_official(raw)


SIZES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(
    st.text(max_size=8).filter(
        lambda name: name != "__metadata__" and not any("\ud800" <= c <= "\udfff" for c in name)
    ),
    st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]), SIZES),
    max_size=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs=TENSORS)
def test_round_trip_of_any_names_and_shapes(tmp_path: Path, specs: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in specs.items()}
    path = tmp_path / "round"
    path.unlink(missing_ok=True)
    assert write(path, tensors) == safetensors.torch.save(tensors)
    header = read_header(path)
    assert {n: e.shape for n, e in header.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
