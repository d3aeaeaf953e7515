"""The digest of a tensor against its slow twin in Python's integers; and that no change of a word goes unseen."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardrun.comm.communicator import Communicator
from shardrun.run import replicas
from shardrun.run.replicas import CHUNK, FORMER_CHUNK, _numbers, digest


def slow_digest(tensor: Tensor, chunk: int) -> str:
    """As the note in replicas.py says."""
    numbers = _numbers(torch.device("cpu")).tolist()[:chunk]
    raw = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw) // 8 * 8, 8)]
    whole = len(words) // chunk * chunk
    pieces = [words[at : at + chunk] for at in range(0, whole, chunk)] + [words[whole:]]
    content = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    for piece in pieces:
        total = sum(word * number for word, number in zip(piece, numbers, strict=False))
        content.update((total % 2**64).to_bytes(8, "little"))
    content.update(raw[len(words) * 8 :])
    return content.hexdigest()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.float32),
        ((0, 3), torch.float32),
        ((7,), torch.bfloat16),
        ((15, 3), torch.float32),
        ((70_001,), torch.float32),
        ((3, 40_001), torch.bfloat16),
        ((11,), torch.bool),
    ],
)
@pytest.mark.parametrize("chunk", [1_024, 16_384])
def test_a_digest_is_what_the_note_says(shape: tuple[int, ...], dtype: torch.dtype, chunk: int) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert digest(tensor, chunk) == slow_digest(tensor, chunk)


def test_the_digest_of_today_and_that_of_format_1() -> None:
    tensor = torch.arange(70_001.0)
    assert digest(tensor) == digest(tensor, 1_024) == "f6121e9f041934a3"
    assert digest(tensor, FORMER_CHUNK) == "cd9012e55a0baec5"


def test_it_reads_elements_in_their_order_wherever_they_lie() -> None:
    flat = torch.randn(101)
    assert digest(flat[1:]) == digest(flat[1:].clone())
    matrix = torch.randn(6, 5)
    assert digest(matrix.t()) == digest(matrix.t().contiguous()) != digest(matrix.reshape(5, 6))
    assert digest(matrix) != digest(matrix.view(torch.int32))
    leaf = torch.randn(3, requires_grad=True)
    assert digest(leaf) == digest(leaf.detach())


@settings(deadline=None, max_examples=200)
@given(numel=st.integers(1, 40_000), where=st.integers(min_value=0), bit=st.integers(0, 31))
def test_every_single_bit_counts(numel: int, where: int, bit: int) -> None:
    tensor = torch.zeros(numel)
    before = digest(tensor)
    words = tensor.view(torch.int32)
    words[where % numel] ^= (1 << bit) if bit < 31 else -(2**31)
    assert digest(tensor) != before


def test_a_device_sums_as_the_processor_does() -> None:
    rows = torch.randint(-(2**63), 2**63 - 1, (9_000, CHUNK))
    numbers = _numbers(torch.device("cpu"))[:CHUNK]
    assert torch.equal(torch.cat(replicas._sums(rows, numbers)), torch.mv(rows, numbers))


def test_places_and_signs_count() -> None:
    one, other = torch.zeros(65_536), torch.zeros(65_536)
    one[3], other[32_771] = 1.0, 1.0  # the same place in another chunk
    assert digest(one) != digest(other)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())


def test_a_world_of_one_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(tensor: Tensor) -> str:
        raise AssertionError

    monkeypatch.setattr(replicas, "digest", unexpected)
    replicas.compare_replicas(Communicator.single(), torch.nn.Linear(2, 2), [], "step 1 is not saved", in_parts=False)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (["a", "b"], "rank 0 and rank 1 differ, and nobody can say who is right"),
        (["a", "a", "b"], "rank 2 differs from ranks 0,1, who agree"),
        (["c", "a", "a", "b", "a"], "ranks 0,3 differ from ranks 1,2,4, who agree"),
        (["a", "b", "b", "a", "c"], "ranks 0,3 and ranks 1,2 and rank 4 differ, and nobody can say who is right"),
    ],
)
def test_the_most_are_held_to_be_right(held: list[str], said: str) -> None:
    assert replicas._sides(dict(enumerate(held))) == said
